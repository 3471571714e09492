import os
import subprocess
import sys
import zipfile

import pytest
from bundles import packed
from processes import WITHOUT_PYTORCH

from cutlass_ops import __version__
from cutlass_ops.artifacts.bundle import manifest_of, open_bundle
from cutlass_ops.ship.packing import write_wheel


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    root = tmp_path_factory.mktemp("wheel")
    packed(root).write(root / "kernels.bundle")
    return root / "kernels.bundle"


def test_kernels_of_a_bundle_are_packed_again_to_the_same_bytes(bundle):
    found = open_bundle(bundle)
    assert manifest_of(found.kernels(), {}, []).to_bytes() == found.manifest.to_bytes()


LOOK = f"""{WITHOUT_PYTORCH}
from cutlass_ops.artifacts.bundles import Bundles
found = Bundles.current().all()
print(sum(len(bundle.kernels()) for bundle in found), "kernels", *(bundle.installed_with for bundle in found))
"""


def _installed(wheel, site, umask):
    """Install a wheel as a user with this umask does, and look what is found."""
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", site, wheel]
    subprocess.run(install, check=True, capture_output=True, umask=umask)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(site), *sys.path])}
    return subprocess.run([sys.executable, "-c", LOOK], env=environment, check=False, capture_output=True, text=True)


@pytest.mark.slow
@pytest.mark.parametrize("umask", [0o022, 0o002])
def test_a_wheel_is_installed_by_pip_and_found(tmp_path, bundle, umask):
    wheel = write_wheel(bundle, tmp_path, "my-kernels", "1.2")
    assert wheel.name == "my_kernels-1.2-py3-none-linux_x86_64.whl"
    (tmp_path / "site").mkdir()
    (tmp_path / "site").chmod(0o777 & ~umask)
    done = _installed(wheel, tmp_path / "site", umask)
    assert (done.returncode, done.stdout) == (0, "3 kernels my-kernels 1.2\n"), done.stderr


@pytest.mark.slow
def test_an_installed_bundle_is_written_by_nobody_who_may_not_write_the_packages(tmp_path, bundle):
    wheel = write_wheel(bundle, tmp_path, "my-kernels", "1.2")
    (tmp_path / "site").mkdir(mode=0o755)
    done = _installed(wheel, tmp_path / "site", 0o002)
    assert done.stdout == "0 kernels\n"
    assert "my_kernels.bundle is not safe" in done.stderr
    assert "chmod" in done.stderr
    (tmp_path / "site").chmod(0o777)
    bundle = tmp_path / "site" / "cutlass_ops_bundles" / "my_kernels" / "my_kernels.bundle"
    bundle.chmod(0o666)  # by everybody is never well
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path / "site"), *sys.path])}
    done = subprocess.run([sys.executable, "-c", LOOK], env=environment, check=False, capture_output=True, text=True)
    assert done.stdout == "0 kernels\n"
    assert "is not safe" in done.stderr


def test_a_wheel_is_reproducible_and_whole(tmp_path, bundle):
    wheels = [write_wheel(bundle, tmp_path / name, "my.kernels") for name in "ab"]
    assert wheels[0].read_bytes() == wheels[1].read_bytes()
    assert wheels[0].name.startswith(f"my_kernels-{__version__}+")
    with zipfile.ZipFile(wheels[0]) as archive:
        assert archive.testzip() is None
        assert archive.read("cutlass_ops_bundles/my_kernels/my_kernels.bundle") == bundle.read_bytes()
        (record,) = (n for n in archive.namelist() if n.endswith("RECORD"))
        assert len(archive.read(record).splitlines()) == len(archive.namelist())


@pytest.mark.parametrize(("name", "version"), [("../x", "1"), ("a\n", "1"), ("", "1"), ("a", "x"), ("a", "1\nName: b")])
def test_names_and_versions_are_checked(tmp_path, bundle, name, version):
    with pytest.raises(ValueError, match=r"is not a valid package (name|version)"):
        write_wheel(bundle, tmp_path, name, version)


@pytest.mark.parametrize("name", ["cutlass_ops", "Cutlass.Ops"])
def test_a_wheel_does_not_replace_the_library(tmp_path, bundle, name):
    with pytest.raises(ValueError, match="is this library, which the wheel would replace"):
        write_wheel(bundle, tmp_path, name, "1")
