"""The wheel holds what it must, works away from the repository, and hides nobody else's package."""

import configparser
import importlib.util
import shutil
import subprocess
import sys
import zipfile
from importlib.resources import files
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ("pyproject.toml", "README.md", "LICENSE", "vllm_tilequant", "kernels", "calibrate", "configs")


def python(code: str, *args: str, cwd: Path) -> str:
    """Run code in a fresh interpreter; returns its stdout."""
    done = subprocess.run([sys.executable, *args, "-c", code], cwd=cwd, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Built from a copy, without network: no stale build folder of the checkout can slip in."""
    if importlib.util.find_spec("setuptools") is None:
        pytest.skip("setuptools is not installed")
    tmp = tmp_path_factory.mktemp("wheel")
    source = tmp / "source"
    source.mkdir()
    for entry in SOURCES:
        if (ROOT / entry).is_dir():
            shutil.copytree(ROOT / entry, source / entry, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / entry, source / entry)
    code = f"from setuptools import build_meta; print(build_meta.build_wheel({str(tmp)!r}))"
    python(code, cwd=source)
    (built,) = tmp.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def unpacked(wheel, tmp_path_factory) -> Path:
    target = tmp_path_factory.mktemp("unpacked")
    with zipfile.ZipFile(wheel) as z:
        z.extractall(target)
    return target


def in_wheel(code: str, unpacked: Path) -> str:
    """Run code against the unpacked wheel only: -P and the path entry keep the checkout and the current folder out."""
    drop = f"sys.path[:0] = [{str(unpacked)!r}]; sys.meta_path[:] = [m for m in sys.meta_path if 'editable' not in repr(m)]"
    return python(f"import sys; {drop}; {code}", "-P", cwd=unpacked)


def test_every_source_file_is_in_the_wheel(wheel):
    with zipfile.ZipFile(wheel) as z:
        inside = {n for n in z.namelist() if n.startswith("vllm_tilequant/")}
    wanted = set()
    for folder in ("kernels", "calibrate", "configs"):
        wanted |= {f"vllm_tilequant/{f.relative_to(ROOT)}" for f in (ROOT / folder).rglob("*") if f.is_file()}
    wanted |= {str(f.relative_to(ROOT)) for f in (ROOT / "vllm_tilequant").rglob("*") if f.is_file()}
    wanted = {w for w in wanted if "__pycache__" not in w}
    assert wanted - inside == set()
    assert {"vllm_tilequant/kernels/layout.py", "vllm_tilequant/configs/calibration/bundled.txt"} <= inside


def test_nothing_lands_at_the_top_level(unpacked):
    assert [p.name for p in unpacked.iterdir() if not p.name.endswith(".dist-info")] == ["vllm_tilequant"]
    for folder in ("kernels", "calibrate", "configs"):
        assert not (unpacked / "vllm_tilequant" / folder / "__init__.py").exists()


def test_entry_points(unpacked):
    (file,) = unpacked.glob("*.dist-info/entry_points.txt")
    points = configparser.ConfigParser()
    points.read(file)
    assert points["vllm.general_plugins"]["tilequant"] == "vllm_tilequant:register"
    assert points["console_scripts"]["tilequant"] == "vllm_tilequant.cli:main"


def test_the_wheel_works_away_from_the_repository(unpacked):
    code = "import vllm_tilequant.kernels.layout as m, vllm_tilequant.kernels.portable; print(m.__file__)"
    assert Path(in_wheel(code, unpacked)) == unpacked / "vllm_tilequant" / "kernels" / "layout.py"


def test_the_bundled_text_is_found_in_wheel_and_checkout(unpacked):
    code = (
        "from importlib.resources import files; "
        "print(len((files('vllm_tilequant.configs') / 'calibration' / 'bundled.txt').read_text().split()))"
    )
    words = int(in_wheel(code, unpacked))
    assert words > 5000
    assert len((files("vllm_tilequant.configs") / "calibration" / "bundled.txt").read_text().split()) == words


@pytest.mark.parametrize("name", ["kernels", "calibrate", "configs"])
def test_no_top_level_package_of_ours(name, tmp_path):
    """Installed as it is here, and run from elsewhere: a `kernels` that is found must be someone else's."""
    code = (
        f"import importlib.util as u; s = u.find_spec({name!r}); print(s and (s.origin or list(s.submodule_search_locations)))"
    )
    assert str(ROOT) + "/" + name not in python(code, cwd=tmp_path)


def test_hugging_face_kernels_is_not_hidden_in_the_checkout(tmp_path):
    """From the repository root, where `kernels/` is visible, a real package of that name further along the path wins."""
    other = tmp_path / "kernels"
    other.mkdir()
    (other / "__init__.py").write_text("MARK = 'theirs'\n")
    code = f"import sys; sys.path.append({str(tmp_path)!r}); import vllm_tilequant, kernels; print(kernels.__file__)"
    assert python(code, cwd=ROOT) == str(other / "__init__.py")
