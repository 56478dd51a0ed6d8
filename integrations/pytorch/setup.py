"""Builds claystone's C library with cargo, unless CLAYSTONE_LIBRARY names a folder that contains it, and the extension against the
installed torch. It does not import torch, because pip builds in an isolated environment without torch; it looks in the
interpreter's site-packages instead."""

import os
import re
import shutil
import subprocess
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

here = Path(__file__).resolve().parent
repository = here.parents[1]


def torch_folder():
    candidates = [os.environ.get("CLAYSTONE_TORCH_SITE"), sysconfig.get_path("platlib"), sysconfig.get_path("purelib")]
    for candidate in filter(None, candidates):
        if (Path(candidate) / "torch/include/ATen").is_dir():
            return Path(candidate) / "torch"
    raise SystemExit(
        "claystone-torch is built against an installed torch, but this environment has none: "
        "pip install torch first, or set CLAYSTONE_TORCH_SITE to the site-packages folder that contains it"
    )


def library():
    """The path of claystone's C library: in the folder CLAYSTONE_LIBRARY, or built by cargo."""
    given = os.environ.get("CLAYSTONE_LIBRARY")
    if given:
        built = Path(given).resolve() / "libclaystone_capi.so"
        if not built.is_file():
            raise SystemExit(f"CLAYSTONE_LIBRARY names {given}, which has no libclaystone_capi.so")
        return built
    profile = os.environ.get("CLAYSTONE_TORCH_PROFILE", "release")
    subprocess.run(["cargo", "build", "-p", "claystone-capi", "--profile", profile], cwd=repository, check=True)
    target = Path(os.environ.get("CARGO_TARGET_DIR", repository / "target"))
    # cargo's profile `dev` builds into the folder `debug`.
    return repository / target / ("debug" if profile == "dev" else profile) / "libclaystone_capi.so"


class BuildExt(build_ext):
    def run(self):
        built = library()
        package = here if self.inplace else Path(self.build_lib)
        (package / "claystone_torch").mkdir(parents=True, exist_ok=True)
        shutil.copy2(built, package / "claystone_torch")
        (package / "claystone_torch/_built_with.py").write_text(f'TORCH = "{minor}"\n')
        self.extensions[0].library_dirs.append(str(built.parent))
        super().run()

    def build_extensions(self):
        # Compiles in parallel: setuptools compiles one file after another, and torch's headers are slow to compile.
        compile_one = self.compiler._compile
        jobs = []
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            self.compiler._compile = lambda *arguments: jobs.append(pool.submit(compile_one, *arguments))
            link = self.compiler.link_shared_object

            def link_when_compiled(*arguments, **options):
                for job in jobs:
                    job.result()
                link(*arguments, **options)

            self.compiler.link_shared_object = link_when_compiled
            super().build_extensions()


torch = torch_folder()
minor = re.search(r"__version__ = ['\"](\d+\.\d+)", (torch / "version.py").read_text())[1]
extension = Extension(
    "claystone_torch._C",
    sources=sorted(str(path.relative_to(here)) for path in here.glob("csrc/*.cpp")),
    depends=sorted(str(path.relative_to(here)) for path in here.glob("csrc/*.h")),
    include_dirs=[str(torch / "include"), str(torch / "include/torch/csrc/api/include"), str(torch / "include/kineto"), str(repository / "integrations/capi/include")],
    library_dirs=[str(torch / "lib")],
    libraries=["c10", "torch", "torch_cpu", "torch_python", "claystone_capi"],
    runtime_library_dirs=["$ORIGIN"],
    extra_compile_args=["-std=c++20", os.environ.get("CLAYSTONE_TORCH_OPT", "-O2"), "-g0", "-Wall", "-Wno-sign-compare"],
    language="c++",
)
# The C++ interfaces of torch change with its minor version, so that a wheel and compiled files belong to one.
setup(
    version=f"0.1.0+torch{minor}",
    install_requires=[f"torch=={minor}.*"],
    options={"build": {"build_base": f"build/torch{minor}"}},
    ext_modules=[extension],
    cmdclass={"build_ext": BuildExt},
)
