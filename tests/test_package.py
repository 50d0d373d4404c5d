"""The package as a whole: import directions, the public API, what importing costs, names, backends."""

import ast
import copy
import inspect
import multiprocessing
import pickle
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import timm
import torch

import tokamix
from tokamix.models._registry import count_sizes, known_sizes, sizes
from tokamix.ops import dispatch

PACKAGE = Path(tokamix.__file__).parent
# from the lowest to the highest: a folder imports only itself and what stands before it; `cli` imports all
ORDER = (
    *(
        "_construction",
        "_openmp",
        "_hints",
        "_hub",
        "_register",
        "_lazy",
        "files",
        "tasks",
        "distributed",
        "compile",
        "ops",
        "layers",
        "mixers",
        "cost",
        "swap",
    ),
    *("checkpoint", "models", "runtimes", "inference", "recipes", "data", "dense", "predict", "embed", "evaluate"),
    *("vqa", "train", "transfer", "probe", "explain", "export", "bench", "study", "compare", "convert"),
    *("demo", "studio", "cli", "__main__"),
)
# `load_model` imports the dense models inside the function: only users of segmenters and detectors load them
DEFERRED = {"inference.py imports tokamix.dense.saved"}
PUBLIC = {
    *("create_model", "list_models", "create_body", "create_mixer", "create_segmenter", "create_detector"),
    *("train", "evaluate", "predict", "load_recipe", "list_recipes", "create_dataset", "swap_mixer"),
    *("insert_context_broadcast", "remove_context_broadcast", "load_checkpoint", "count_macs", "count_exp"),
    *("InferenceConfig", "compare", "evaluate_robustness", "explain", "export", "transfer", "embed", "probe"),
    "convert",
}


def level(module: str) -> int:
    return ORDER.index(module.split(".")[1])


def imports(path: Path) -> set[str]:
    """The tokamix modules a file imports, at top level or inside functions."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            names |= {f"tokamix.{a.name}" for a in node.names} if node.module == "tokamix" else {node.module or ""}
    return {name for name in names if name.startswith("tokamix.")}


def modules() -> list[Path]:
    return sorted(p for p in PACKAGE.rglob("*.py") if p != PACKAGE / "__init__.py")


def test_every_module_has_a_level() -> None:
    assert len(modules()) > 20
    assert {p.relative_to(PACKAGE).parts[0].removesuffix(".py") for p in modules()} <= set(ORDER)


def test_import_directions() -> None:
    upward = set()
    for path in modules():
        own = level("tokamix." + ".".join(path.relative_to(PACKAGE).with_suffix("").parts))
        upward |= {f"{path.relative_to(PACKAGE)} imports {name}" for name in imports(path) if level(name) > own}
    assert upward == DEFERRED


def is_plain(node: ast.stmt) -> bool:
    """Whether an `__init__.py` may hold a statement: docstring, imports, `__all__` and the lazy `__getattr__`."""
    if isinstance(node, ast.If):
        return ast.unparse(node.test) == "TYPE_CHECKING" and all(map(is_plain, node.body)) and not node.orelse
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Constant) or ast.unparse(node) == "register_with_timm()"
    if isinstance(node, ast.Assign):
        return ast.unparse(node.targets[0]) in ("__all__", "__version__", "(__getattr__, __dir__)")
    return isinstance(node, ast.Import | ast.ImportFrom)


def test_init_files_are_thin() -> None:
    logic = [
        f"{path.relative_to(PACKAGE)}:{node.lineno}"
        for path in PACKAGE.rglob("__init__.py")
        for node in ast.parse(path.read_text()).body
        if not is_plain(node)
    ]
    assert not logic


def test_nothing_private_of_timm_is_imported() -> None:
    for path in modules():
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            assert not [n for n in names if n.startswith("timm.") and "._" in n], path


def python(code: str, *options: str) -> str:
    """Standard output of a new interpreter."""
    command = [sys.executable, *options, "-c", textwrap.dedent(code)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    return result.stdout.strip()


def test_import_loads_neither_torch_nor_timm() -> None:
    """`python -X importtime` is not needed: without these packages the import takes a few hundredths of a second."""
    heavy = "{'torch', 'timm', 'torchvision', 'numpy', 'triton', 'rich', 'typer', 'yaml'}"
    assert python(f"import sys, tokamix; print({heavy} & set(sys.modules))") == "set()"


def test_imports_in_any_order() -> None:
    """Models are registered once, silently, without a device query, Triton or another heavy package.

    Each order is tried in a fork of a process that has imported torch but not timm. In the later ones timm is first
    imported by a module that the models need themselves.
    """
    out = python(
        """
        import importlib, os, sys
        import torch, torchvision
        assert "timm" not in sys.modules
        torch.cuda.is_available = torch.cuda.device_count = lambda: os._exit(1)
        orders = ["timm tokamix", "tokamix timm.data"]
        orders += [f"tokamix.{name}" for name in ("layers", "mixers", "swap", "cost")]
        for order in orders:
            if os.fork() == 0:
                for name in order.split():
                    before = set(sys.modules)
                    importlib.import_module(name)
                import timm, tokamix
                if order == "timm tokamix":
                    heavy = ("triton", "sklearn", "matplotlib", "transformers", "onnx", "tokamix.train")
                    new = set(sys.modules) - before
                    assert not [m for m in new if m.startswith(heavy) or m.endswith(".kernels")], new
                print(order, *timm.list_models("stvit*"))
                assert type(timm.create_model("stvit_small", device="meta")).__name__ == "STViT"
                assert not [f for f in sys.meta_path if type(f).__module__.startswith("tokamix")]
                if order == "tokamix.layers":
                    from tokamix.train import train  # would bind the package to tokamix.train
                    assert tokamix.train is train and tokamix.evaluate.__name__ == "evaluate"
                    assert tokamix.bench.__name__ == "tokamix.bench" and tokamix.ops.__name__ == "tokamix.ops"
                sys.stdout.flush()
                os._exit(0)
            assert os.wait()[1] == 0, order
        """,
        *("-W", "error::UserWarning"),
    )
    lines = out.splitlines()
    assert len(lines) == 6
    assert all(line.endswith("stvit_base stvit_large stvit_small") for line in lines)


def test_a_spawned_process_unpickles_models_and_public_functions() -> None:
    model = tokamix.create_body("columnar_tiny", "sima", num_classes=3, depth=1, dim=8, num_heads=1)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert len(pool.apply_async(tokamix.list_models, ("stvit",)).get(120)) == 3
        assert type(pool.apply_async(copy.copy, (model,)).get(120)) is type(model)
    assert pickle.loads(pickle.dumps(tokamix.train)) is tokamix.train


def test_public_api() -> None:
    assert set(tokamix.__all__) == PUBLIC
    assert list(tokamix.__all__) == sorted(tokamix.__all__)
    assert set(dir(tokamix)) >= PUBLIC
    for name in tokamix.__all__:
        value = getattr(tokamix, name)
        assert value.__name__ == name
        assert inspect.getdoc(value)
    declared = next(n for n in ast.parse((PACKAGE / "__init__.py").read_text()).body if isinstance(n, ast.If))
    names = {alias.name for node in declared.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert names == PUBLIC, "the imports for type checkers differ from __all__"


def test_unknown_attributes() -> None:
    with pytest.raises(AttributeError, match="module 'tokamix' has no attribute 'create_modell'"):
        _ = tokamix.create_modell
    assert not hasattr(tokamix, "__wrapped__")


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
    """The table of the package holds every model; a sample of its rows is counted again."""
    table = known_sizes()
    assert set(table) == set(tokamix.list_models())
    for name in ("amixer_deit_small", "atmnet_xtiny", "columnar_tiny_pooling", "deit_small_sima", "pvt_tiny"):
        assert sizes(name) == table[name] == count_sizes(name), f"{name}: run benchmarks/sizes.py"
