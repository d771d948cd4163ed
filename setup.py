"""The compiled part of the package. Everything else is in pyproject.toml.

It is optional: without a C compiler the package installs and works the same, more slowly.
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
                "src/cirron_otel/_rows.h",
            ],
            optional=True,
        ),
    ],
)
