"""The compiled parts of the package. Everything else is in pyproject.toml.

They are optional: without a C compiler the package installs and works the same, more slowly.
"""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "cirron_otel._fast",
            ["src/cirron_otel/_fast.c"],
            depends=[
                "src/cirron_otel/_hooks.h",
                "src/cirron_otel/_files.h",
                "src/cirron_otel/_joined.h",
                "src/cirron_otel/_marks.h",
                "src/cirron_otel/_rows.h",
            ],
            optional=True,
        ),
        Extension(
            "cirron_otel._record",
            ["src/cirron_otel/_record.c"],
            depends=[
                "src/cirron_otel/_record_encode.h",
                "src/cirron_otel/_record_layers.h",
                "src/cirron_otel/_record_line.h",
                "src/cirron_otel/_record_numbers.h",
                "src/cirron_otel/_record_sha.h",
                "src/cirron_otel/_record_text.h",
                "src/cirron_otel/_record_values.h",
                "src/cirron_otel/_record_walk.h",
            ],
            # The same numbers to the last bit as in Python, on every processor.
            extra_compile_args=["-O3", "-ffp-contract=off"],
            libraries=["m"],
            optional=True,
        ),
        Extension(
            "cirron_otel._weights",
            ["src/cirron_otel/_weights.c"],
            depends=[
                "src/cirron_otel/_weights_avx2.h",
                "src/cirron_otel/_weights_kernel.h",
                "src/cirron_otel/_weights_sums.h",
                "src/cirron_otel/_weights_threads.h",
            ],
            # Sums in any order where the source says so; nothing here reads errno or the flags of
            # the floating-point unit.
            extra_compile_args=["-O3", "-fopenmp-simd", "-fno-math-errno", "-fno-trapping-math"],
            libraries=["m"],
            extra_link_args=["-pthread"],
            optional=True,
        ),
    ],
)
