"""Only what pyproject.toml can not say: the compiled modules, left out where there is no compiler or no liburing."""

from setuptools import Extension, setup

setup(ext_modules=[Extension("nvpool.drive._uring", ["nvpool/drive/_uring.pyx"], libraries=["uring"], optional=True),
                   Extension("nvpool.wire._frame", ["nvpool/wire/_frame.pyx"], optional=True)])
