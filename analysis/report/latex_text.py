"""Text for LaTeX that compiles with pdflatex, xelatex and lualatex, whatever it contains."""

from itertools import groupby

__all__ = ["latex_text"]

_ASCII = {
    "\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "#": r"\#", "$": r"\$", "%": r"\%",
    "&": r"\&", "_": r"\_", "^": r"\textasciicircum{}", "~": r"\textasciitilde{}",
    "<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}", "`": r"\textasciigrave{}",
    "'": r"\textquotesingle{}",
    # At the start of a row these would be arguments of the line end before it.
    "[": "{[}", "]": "{]}", "*": "{*}",
}  # fmt: skip
_WORDS = (
    "– endash — emdash ‘ quoteleft ’ quoteright “ quotedblleft ” quotedblright … ellipsis "
    "• bullet § section © copyright"
)
_MATHEMATICS = (
    "α alpha β beta γ gamma δ delta ε varepsilon ζ zeta η eta θ theta ι iota κ kappa λ lambda μ mu "
    "ν nu ξ xi π pi ρ rho σ sigma τ tau υ upsilon φ varphi χ chi ψ psi ω omega Γ Gamma Δ Delta "
    "Θ Theta Λ Lambda Ξ Xi Π Pi Σ Sigma Υ Upsilon Φ Phi Ψ Psi Ω Omega "
    "± pm × times ÷ div · cdot ≤ leq ≥ geq ≠ neq ≈ approx ≪ ll ≫ gg √ surd ∞ infty ∈ in ∑ sum "
    "∏ prod ‖ Vert → rightarrow ← leftarrow ↔ leftrightarrow ↑ uparrow ↓ downarrow µ mu"
)
_RAISED = dict(zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ᵀⁿ", "0123456789+-Tn", strict=True))
_LOWERED = dict(zip("₀₁₂₃₄₅₆₇₈₉₊₋", "0123456789+-", strict=True))


def _pairs(text: str) -> list[tuple[str, str]]:
    words = text.split()
    return list(zip(words[::2], words[1::2], strict=True))


# Accented Latin letters stay as they are: every encoding of pdflatex's fonts can make these.
_SPELLED = {chr(code): chr(code) for code in [*range(0x20, 0x7F), *range(0xC0, 0x100)]}
for _foreign in "ÐðÞþ×÷":
    del _SPELLED[_foreign]
# LuaTeX takes U+FFFD for a broken file.
_SPELLED |= _ASCII | {"−": r"\ensuremath{-}", "�": "?"}
_SPELLED |= {letter: rf"\text{name}{{}}" for letter, name in _pairs(_WORDS)}
_SPELLED |= {letter: rf"\ensuremath{{\{name}}}" for letter, name in _pairs(_MATHEMATICS)}
_SPELLED |= {letter: rf"\ensuremath{{^{{{figure}}}}}" for letter, figure in _RAISED.items()}
_SPELLED |= {letter: rf"\ensuremath{{_{{{figure}}}}}" for letter, figure in _LOWERED.items()}


def latex_text(text: str) -> str:
    """Escape a text so that LaTeX shows it as it is.

    Greek letters, common signs, superscripts and subscripts become math. Letters of other scripts
    are left to Unicode engines, whose font must have them; pdflatex, which would stop at them,
    shows question marks.
    """
    written = ""
    for known, letters in groupby(text, key=_SPELLED.__contains__):
        run = "".join(letters)
        if known:
            written += "".join(map(_SPELLED.__getitem__, run))
        else:
            # What only Unicode engines have; it may occur in a caption too.
            written += rf"\ifdefined\Umathchar {run}\else {'?' * len(run)}\fi{{}}"
    for ligature in ("--", ",,"):
        while ligature in written:
            written = written.replace(ligature, "{}".join(ligature))
    return written
