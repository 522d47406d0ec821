"""Only what pyproject.toml can not say: the compiled modules, each left out where it does not compile."""

from setuptools import Extension, setup

setup(ext_modules=[Extension("nvpool.drive._uring", ["nvpool/drive/_uring.pyx"], libraries=["uring"], optional=True),
                   Extension("nvpool.base._blocks", ["nvpool/base/_blocks.pyx"], depends=["nvpool/base/_block_sums.h"],
                             include_dirs=["nvpool/base"], extra_compile_args=["-O2"], optional=True),
                   Extension("nvpool.fuse._plainreads", ["nvpool/fuse/_plainreads.pyx"],
                             depends=["nvpool/base/_block_sums.h", "nvpool/drive/_uring.pxd", "nvpool/fuse/_kernel.h"],
                             include_dirs=["nvpool/base", "nvpool/fuse"], libraries=["uring"], extra_compile_args=["-O2"],
                             optional=True),
                   Extension("nvpool.fuse._farreads", ["nvpool/fuse/_farreads.pyx"],
                             depends=["nvpool/base/_block_sums.h", "nvpool/wire/_crc32c.h", "nvpool/fuse/_kernel.h"],
                             include_dirs=["nvpool/base", "nvpool/wire", "nvpool/fuse"], extra_compile_args=["-O2"],
                             optional=True),
                   Extension("nvpool.wire._frame", ["nvpool/wire/_frame.pyx"], depends=["nvpool/wire/_crc32c.h"],
                             include_dirs=["nvpool/wire"], optional=True),
                   Extension("nvpool.store._atonce", ["nvpool/store/_atonce.pyx"],
                             depends=["nvpool/wire/_crc32c.h", "nvpool/drive/_uring.pxd"], include_dirs=["nvpool/wire"],
                             libraries=["uring"], extra_compile_args=["-O2"], optional=True),
                   Extension("nvpool.store._reads", ["nvpool/store/_reads.pyx"], extra_compile_args=["-O2"], optional=True),
                   Extension("nvpool.kv._record", ["nvpool/kv/_record.pyx"], depends=["nvpool/base/_crc.h"],
                             include_dirs=["nvpool/base"], extra_compile_args=["-O2"], optional=True),
                   Extension("nvpool.meta._atonce", ["nvpool/meta/_atonce.pyx"],
                             depends=["nvpool/base/_crc.h", "nvpool/base/_blake2b.h"],
                             include_dirs=["nvpool/base"], extra_compile_args=["-O2"], optional=True),
                   Extension("nvpool.wire._ucx", ["nvpool/wire/_ucx.pyx"], depends=["nvpool/wire/_ucx_abi.h"],
                             include_dirs=["nvpool/wire"], optional=True)])
