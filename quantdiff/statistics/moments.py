"""Count, mean and central moments in fp64 that merge without loss."""

from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from quantdiff.statistics.lasting import lasting_zeros

__all__ = ["Moments"]

Array = NDArray[np.float64]


@dataclass(eq=False)
class Moments:
    """Central sums Σ(x − mean)^p per group, p = 2, 3, 4.

    Merging follows Pébay, "Formulas for Robust, One-Pass Parallel Computation of Covariances and
    Arbitrary-Order Statistical Moments", SAND2008-6212, 2008.

    Attributes:
        count: (G,) int64.
        mean, m2, m3, m4: (G,) fp64.
    """

    count: NDArray[np.int64]
    mean: Array
    m2: Array
    m3: Array
    m4: Array

    @classmethod
    def empty(cls, groups: int) -> Self:
        """Empty moments of `groups` groups."""
        sums = (lasting_zeros((groups,), np.float64) for _ in range(4))
        return cls(lasting_zeros((groups,), np.int64), *sums)

    @classmethod
    def from_sums(cls, count: NDArray[np.int64], sums: Array, weight: Array, pivot: Array) -> Self:
        """From the sums of powers of t = x·weight − pivot.

        Args:
            count: (G,).
            sums: Σt, Σt², Σt³, Σt⁴, (G, 4).
            weight: (G,), not zero.
            pivot: (G,).
        """
        n = np.maximum(count, 1).astype(np.float64)
        s1, s2, s3, s4 = sums.T
        mu = s1 / n
        m2 = np.maximum(s2 - n * mu**2, 0)
        m3 = s3 - 3 * mu * s2 + 2 * n * mu**3
        m4 = np.maximum(s4 - 4 * mu * s3 + 6 * mu**2 * s2 - 3 * n * mu**4, 0)
        mean = np.where(count > 0, (mu + pivot) / weight, 0.0)
        return cls(count.copy(), mean, m2 / weight**2, m3 / weight**3, m4 / weight**4)

    @property
    def std(self) -> Array:
        """Population standard deviation, (G,); NaN for an empty group."""
        with np.errstate(invalid="ignore", divide="ignore"):
            return np.sqrt(self.m2 / self.count)

    @property
    def kurtosis(self) -> Array:
        """Pearson's kurtosis n·m4 / m2², 3 for a normal distribution, (G,); NaN without spread."""
        with np.errstate(invalid="ignore", divide="ignore"):
            # In this order nothing under- or overflows unless the values themselves do.
            return self.count * (self.m4 / self.m2) / self.m2

    def merge(self, other: "Moments") -> None:
        """Add the moments of other values of the same groups, in place."""
        na, nb = self.count.astype(np.float64), other.count.astype(np.float64)
        n = np.maximum(na + nb, 1)
        delta = np.where((na > 0) & (nb > 0), other.mean - self.mean, 0.0)
        share = delta / n
        self.m4 += (
            other.m4
            + delta * share**3 * na * nb * (na**2 - na * nb + nb**2)
            + 6 * share**2 * (na**2 * other.m2 + nb**2 * self.m2)
            + 4 * share * (na * other.m3 - nb * self.m3)
        )
        self.m3 += (
            other.m3
            + delta * share**2 * na * nb * (na - nb)
            + 3 * share * (na * other.m2 - nb * self.m2)
        )
        self.m2 += other.m2 + delta * share * na * nb
        self.mean[:] = np.where(na > 0, self.mean + share * nb, other.mean)
        self.count += other.count

    def spread(self, groups: NDArray[np.int64], total: int) -> "Moments":
        """The same moments as the given groups of a larger set; the others are empty."""
        result = Moments.empty(total)
        for mine, theirs in zip(result.arrays(), self.arrays(), strict=True):
            mine[groups] = theirs
        return result

    def total(self) -> "Moments":
        """All groups as one, G = 1."""
        result = Moments.empty(1)
        for g in range(len(self.count)):
            one = slice(g, g + 1)
            part = Moments(
                self.count[one], self.mean[one], self.m2[one], self.m3[one], self.m4[one]
            )
            result.merge(part)
        return result

    def arrays(self) -> tuple[NDArray[np.int64], Array, Array, Array, Array]:
        """count, mean, m2, m3, m4."""
        return self.count, self.mean, self.m2, self.m3, self.m4
