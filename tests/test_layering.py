"""Who may import whom, read from the sources, and what an import of the package may start."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "vllm_tilequant"
PLUGIN = {f"vllm_tilequant.{stem}" for stem in ("config", "linear", "parameters", "ops", "state")}
SCHEMA = "vllm_tilequant.schema"
KERNELS = sorted((ROOT / "kernels").rglob("*.py"))
CALIBRATE = sorted((ROOT / "calibrate").rglob("*.py"))
REST = sorted(PACKAGE.rglob("*.py"))
ALL = [*KERNELS, *CALIBRATE, *sorted((ROOT / "configs").rglob("*.py")), *REST]


def imports(file: Path, root: Path = ROOT) -> set[str]:
    """Every module that a file imports anywhere, `from a import b` as both `a` and `a.b`; relative ones made absolute."""
    relative = file.relative_to(root).with_suffix("").parts
    package = (relative if relative[0] == "vllm_tilequant" else ("vllm_tilequant", *relative))[:-1]
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(part for part in (base, node.module) if part)
            found |= {module} | {f"{module}.{alias.name}" for alias in node.names}
    return found


def touches(names: set[str], *modules: str) -> set[str]:
    """Those of `names` that are one of `modules` or lie below it."""
    return {n for n in names if any(n == m or n.startswith(m + ".") for m in modules)}


def name(file: Path) -> str:
    return str(file.relative_to(ROOT))


def test_the_rules_below_see_files():
    assert {f.name for f in KERNELS} >= {"layout.py", "reference.py", "portable.py"}
    assert {f.name for f in REST} >= {"__init__.py", "schema.py"}


def test_import_reader_sees_all_forms(tmp_path):
    """The rules are worth as much as the reader: absolute, from, nested and relative imports."""
    source = "import torch.cuda\ndef f():\n    from vllm.config import X\nfrom . import schema\nfrom .kernels import layout\n"
    file = tmp_path / "vllm_tilequant" / "probe.py"
    file.parent.mkdir()
    file.write_text(source)
    found = imports(file, tmp_path)
    assert found >= {"torch.cuda", "vllm.config.X", "vllm_tilequant.schema", "vllm_tilequant.kernels.layout"}


def test_schema_imports_neither_torch_nor_vllm():
    assert not touches(imports(PACKAGE / "schema.py"), "torch", "triton", "vllm", "numpy", "vllm_tilequant")


@pytest.mark.parametrize("file", KERNELS, ids=name)
def test_kernels_import_only_torch_triton_and_the_schema(file):
    allowed = {"torch", "triton", "vllm_tilequant", *sys.stdlib_module_names}
    names = imports(file)
    assert {n.split(".")[0] for n in names} <= allowed
    assert touches(names, "vllm_tilequant") - {"vllm_tilequant"} == touches(
        names, SCHEMA, "vllm_tilequant.kernels", "vllm_tilequant.configs"
    )


@pytest.mark.parametrize("file", CALIBRATE, ids=name)
def test_calibration_never_imports_vllm_or_the_plugin(file):
    assert not touches(imports(file), "vllm", *PLUGIN)


@pytest.mark.parametrize("file", [PACKAGE / f"{m.rpartition('.')[2]}.py" for m in sorted(PLUGIN)], ids=name)
def test_plugin_never_imports_calibration(file):
    if not file.exists():
        pytest.skip("not part of the package")
    assert not touches(imports(file), "vllm_tilequant.calibrate", "llmcompressor", "compressed_tensors")


def test_only_the_plugin_imports_vllm():
    allowed = {PACKAGE / f"{m.rpartition('.')[2]}.py" for m in PLUGIN}
    assert [name(f) for f in ALL if f not in allowed and touches(imports(f), "vllm")] == []


@pytest.mark.parametrize("module", ["vllm_tilequant", "vllm_tilequant.schema", "vllm_tilequant.cli"])
def test_an_import_starts_nothing_heavy(module):
    """A server imports the package in each of its processes; `torch` alone would cost a command line seconds."""
    code = f"import sys, {module}\nprint([m for m in ('torch', 'triton', 'vllm', 'llmcompressor') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


def test_kernels_do_not_start_cuda():
    code = "import torch, vllm_tilequant.kernels.layout, vllm_tilequant.kernels.portable\nprint(torch.cuda.is_initialized())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "False", done.stderr


def test_no_file_is_longer_than_500_lines():
    files = [*ALL, *sorted((ROOT / "tests").glob("*.py")), *sorted((ROOT / "scripts").glob("*.py"))]
    assert {name(f): n for f in files if (n := len(f.read_text().splitlines())) > 500} == {}


@pytest.mark.parametrize("folder", ["kernels", "calibrate", "configs"])
def test_mapped_folders_have_no_init(folder):
    """An importable top-level `kernels` would hide Hugging Face's package of that name."""
    assert not (ROOT / folder / "__init__.py").exists()
