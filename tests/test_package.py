"""The package as a whole: import directions, what importing costs, names, backends."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
import timm
import torch
from timm.models import model_entrypoint

import tokamix
from tokamix.models._registry import count_sizes, known_sizes, sizes
from tokamix.ops import dispatch

PACKAGE = Path(tokamix.__file__).parent
# floors from the ground up; a module may import its own floor and those below it
FLOORS = [
    *("tasks", "files", "distributed", "compile", "ops", "layers", "mixers", "swap", "cost", "models", "checkpoint"),
    *("dense", "bench", "inference", "recipes", "data", "evaluate", "predict", "train", "explain", "demo", "cli"),
    "__main__",
]


def floor(module: str) -> int:
    return FLOORS.index(module.split(".")[1])


def imports(path: Path) -> set[str]:
    """The tokamix modules a file imports, at top level or inside functions."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            found |= {
                f"{node.module}.{alias.name}" if node.module == "tokamix" else node.module
                for node_ in [node]
                for alias in node.names
            }
    return {name for name in found if name.startswith("tokamix.")}


def modules() -> list[Path]:
    return sorted(p for p in PACKAGE.rglob("*.py") if p != PACKAGE / "__init__.py")


def test_every_module_has_a_floor() -> None:
    assert len(modules()) > 20
    assert {p.relative_to(PACKAGE).parts[0].removesuffix(".py") for p in modules()} <= set(FLOORS)


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_lower_floors_never_import_upper_ones(path: Path) -> None:
    own = floor("tokamix." + ".".join(path.relative_to(PACKAGE).with_suffix("").parts))
    above = [name for name in imports(path) if floor(name) > own]
    assert not above or "cli" in path.parts, f"{path.name} imports {above}"


def test_nothing_private_of_timm_is_imported() -> None:
    for path in modules():
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            assert not [n for n in names if n.startswith("timm.") and "._" in n], path


def test_import_is_cheap_and_silent() -> None:
    """No Triton, no device query, no warning, no other heavy package."""
    code = (
        "import sys, torch, timm\n"
        "before = set(sys.modules)\n"
        "torch.cuda.is_available = torch.cuda.device_count = lambda: sys.exit('import queried the device')\n"
        "import tokamix\n"
        "new = set(sys.modules) - before\n"
        "heavy = ('triton', 'sklearn', 'matplotlib', 'transformers', 'onnx')\n"
        "print([m for m in new if m.endswith('.kernels') or m.startswith(heavy)])\n"
    )
    run = subprocess.run([sys.executable, "-W", "error::UserWarning", "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == "[]"
    assert run.stderr == ""


def test_data_and_recipes_do_not_load_the_dense_models() -> None:
    code = (
        "import sys\n"
        "import tokamix.data, tokamix.recipes\n"
        "print([name for name in sys.modules if name.startswith('tokamix.dense')])\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == "[]"


def test_unknown_names_get_a_hint() -> None:
    with pytest.raises(ValueError, match=r"no model 'stvit_smal'; did you mean stvit_small"):
        tokamix.create_model("stvit_smal")
    with pytest.raises(ValueError, match=r"`tokamix models` lists them"):
        tokamix.create_model("zzzzzzzzzzz")
    assert type(tokamix.create_model("resnet18", device="meta")).__name__ == "ResNet"


def test_list_models() -> None:
    assert tokamix.list_models("stvit_small") == ["stvit_small"]
    assert tokamix.list_models("stvit") == ["stvit_base", "stvit_large", "stvit_small"]
    assert tokamix.list_models("atmnet_?iny") == ["atmnet_tiny"]
    assert set(tokamix.list_models()) <= set(timm.list_models())
    assert "resnet18" not in tokamix.list_models()


def test_backend_choice() -> None:
    x = torch.zeros(1)
    assert dispatch.choose("op", x) == "eager"
    with dispatch.use_backend("eager"):
        assert dispatch.choose("op", x) == "eager"
    with dispatch.use_backend("triton"), pytest.raises(RuntimeError, match="op cannot run on the triton backend"):
        dispatch.choose("op", x.double())
    assert "float64" in (dispatch.why_not(x.double()) or "") or "CUDA" in (dispatch.why_not(x.double()) or "")
    with pytest.raises(ValueError, match="unknown backend 'cuda'"), dispatch.use_backend("cuda"):
        pass


def test_sizes_table() -> None:
    """The shipped table holds every model but the grid's; a sample of its rows is counted again."""
    table = known_sizes()
    assert set(table) == {n for n in tokamix.list_models() if not model_entrypoint(n).__module__.endswith(".bodies")}
    for name in ("amixer_deit_small", "atmnet_xtiny", "deit_small_sima", "pvt_tiny", "stvit_small"):
        assert table[name] == count_sizes(name), f"{name}: run benchmarks/sizes.py"
    assert sizes("columnar_tiny_pooling") == count_sizes("columnar_tiny_pooling")
