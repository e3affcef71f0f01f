"""The one thing that pyproject.toml cannot say in a stable way: the optional compiled kernels."""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "quantdiff.statistics._native",
            sources=["quantdiff/statistics/_native.c"],
            depends=["quantdiff/statistics/_native.h", "quantdiff/statistics/_native_kernels.h"],
            extra_compile_args=["-O3", "-std=gnu11", "-pthread", "-fno-fast-math"],
            extra_link_args=["-pthread"],
            optional=True,  # without a C compiler plain torch serves
        ),
        Extension(
            "quantdiff.quantization._rounding",
            sources=["quantdiff/quantization/_rounding.c"],
            extra_compile_args=["-O3", "-std=gnu11", "-fno-fast-math"],
            optional=True,
        ),
    ]
)
