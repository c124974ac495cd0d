"""The layers of the package, read from its import statements: nothing imports upwards, and the core is silent."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "jaxattr"
PART = {  # a module's part, by the first name below `jaxattr`
    "types": 0, "config": 0, "version": 0,
    "ops": 1,
    "networks": 2, "envs": 2,
    "lanes": 3, "rollout": 3, "pools": 3, "attribution": 3, "evaluate": 3,
    "metrics": 4, "update": 4, "train": 4,
    "presets": 5, "studies": 5, "host": 5, "analysis": 5, "testing": 5,
    "": 6,  # the front door, jaxattr/__init__.py
}  # fmt: skip
NARROWER = {  # where the rule is stricter than "own layer and below"
    "types": set(),
    "version": set(),
    "config": {"types"},
    "lanes": set(),
    "networks": {"types", "config", "ops"},
    "envs": {"types", "config", "ops", "envs"},
    "attribution": {"types", "config", "ops", "attribution"},
    "presets": {"config"},
    "analysis": {"analysis"},
}
FILES = sorted(str(p.relative_to(PACKAGE)) for p in PACKAGE.rglob("*.py"))
CORE = [f for f in FILES if PART[f.split("/")[0].removesuffix(".py").replace("__init__", "")] <= 4]
LINEN_ANNOTATIONS = {
    "train.py",
    "host/runner.py",
    "host/agent.py",
    "host/rounds.py",
}  # for the type of a user's module, nothing else
PRINTS = {"envs/brax.py": "passes on what importing brax said on stdout"}


def part_of(module: str) -> str:
    """`jaxattr.ops.trees` -> `ops`, `jaxattr` -> the front door."""
    names = module.split(".")
    return names[1] if len(names) > 1 else ""


@functools.cache
def tree(file: str) -> ast.Module:
    return ast.parse((PACKAGE / file).read_text())


def module_of(file: str) -> str:
    return ".".join(["jaxattr", *Path(file).with_suffix("").parts]).removesuffix(".__init__")


def imports(file: str) -> set[str]:
    """Full names of the modules a file imports, wherever in the file."""
    found = set()
    for node in ast.walk(tree(file)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}:{node.lineno}: relative import"
            # `from jaxattr import x` and `from flax import linen` may name a module or a thing in it
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def ours(file: str) -> set[str]:
    return {part_of(name) for name in imports(file) if name.split(".")[0] == "jaxattr"}


def test_every_module_has_a_layer():
    assert {part_of(module_of(f)) for f in FILES} <= set(PART)
    assert len(FILES) > 30


@pytest.mark.parametrize("file", FILES)
def test_imports_go_one_way(file):
    part = part_of(module_of(file))
    allowed = NARROWER.get(part, {name for name, layer in PART.items() if layer <= PART[part]})
    assert ours(file) - {part} <= allowed, f"{file} imports {sorted(ours(file) - {part} - allowed)}"


def test_the_core_does_not_know_its_users():
    """Layers 0 to 4 stay free of files, command line and figures, also in imports of other packages."""
    heavy = {"tyro", "rich", "orbax", "matplotlib", "tensorboardX", "wandb", "PIL", "pathlib", "os", "time", "logging"}
    for file in CORE:
        assert not {name.split(".")[0] for name in imports(file)} & heavy, file


@pytest.mark.parametrize("file", [f for f in FILES if f.startswith("analysis")])
def test_analysis_needs_no_jax(file):
    assert not {name.split(".")[0] for name in imports(file)} & {"jax", "jaxlib", "flax", "optax", "chex"}


@pytest.mark.parametrize("file", CORE)
def test_the_core_is_silent(file):
    """No printing, files, clocks or calls back to the host."""
    loud = []
    for node in ast.walk(tree(file)):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            last = name.split(".")[-1]
            if name in ("print", "open", "input") or last in (
                "write_text",
                "write_bytes",
                "io_callback",
                "pure_callback",
            ):
                loud.append(name)
            if name.startswith(("jax.debug.", "time.", "sys.stdout", "sys.stderr")):
                loud.append(name)
    if file in PRINTS:
        assert loud == ["print"]
        loud = []
    assert not loud, f"{file} calls {loud}"


@pytest.mark.parametrize("file", [f for f in FILES if f != "networks.py"])
def test_only_networks_builds_with_flax_linen(file):
    """Elsewhere `nn.Module` may stand in an annotation: it is what a user hands in."""
    known = {name for name in imports(file) if name.startswith("flax.linen") or name == "flax.linen"}
    if not known:
        return
    assert file in LINEN_ANNOTATIONS, f"{file} imports flax.linen"
    annotations = set()
    for node in ast.walk(tree(file)):
        for field in ("annotation", "returns"):
            if isinstance(getattr(node, field, None), ast.AST):
                annotations |= {id(x) for x in ast.walk(getattr(node, field))}
    for node in ast.walk(tree(file)):
        if isinstance(node, ast.Name) and node.id == "nn":
            assert id(node) in annotations, f"{file}:{node.lineno}: flax.linen used outside an annotation"


def test_the_front_door_lists_what_it_imports():
    (names,) = [
        ast.literal_eval(node.value)
        for node in tree("__init__.py").body
        if isinstance(node, ast.Assign) and node.targets[0].id == "__all__"
    ]
    imported = {alias.asname or alias.name for node in tree("__init__.py").body if isinstance(node, ast.ImportFrom)
                for alias in node.names}  # fmt: skip
    assert imported == set(names)
    assert names == sorted(names)
