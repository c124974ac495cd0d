"""Every command and every code block in README.md and CONTRIBUTING.md runs, in order, with small numbers."""

import importlib.util
import re
import shlex
from pathlib import Path

import pytest

import jaxattr
from jaxattr.attribution.estimators import ESTIMATORS
from jaxattr.attribution.filters import FILTERS
from jaxattr.attribution.targets import TARGETS
from jaxattr.envs import registry
from jaxattr.host.cli import main

ROOT = Path(__file__).parents[1]
DOCUMENTS = ("README.md", "CONTRIBUTING.md")

SMALL = {"--seeds": 3, "--rounds": 6, "--total-steps": 4096, "--episodes": 2, "--subsets": 20}
"""The most that a command in a document may ask for when the tests run it."""
EXTRA = {
    "train": ["--eval-episodes", "2", "--quiet"],
    "compare": ["--eval-episodes", "2", "--quiet"],
    "render": ["--max-steps", "20"],
    "diagnose": ["--quiet"],
    "counterfactual": ["--quiet", "--extremes", "4"],
    "behaviour": ["--quiet"],
    "intervene": ["--episodes", "2", "--quiet"],
    "sweep": ["--quiet"],
}
SWEEP = "benchmarks/sweeps/cartpole.toml"
"""Where a document's sweep is; the tests run it from a copy with less in it."""
NOT_RUN = (  # what only makes sense on a fresh machine, and the tests themselves
    r"python3 -m venv \.venv",
    r"\.venv/bin/pip install -c constraints\.txt -e \.(\[[a-z,]+\])?",
    r"\.venv/bin/python -m pytest",
    r"\.ci/run",
)


def blocks(document, languages):
    text = (ROOT / document).read_text()
    return [body for kind, body in re.findall(r"^```(\w*)\n(.*?)^```$", text, re.M | re.S) if kind in languages]


def commands(document):
    """The words of each command, in order; `&&` separates commands."""
    found = []
    for body in blocks(document, ("bash", "console")):
        lines = [line.removeprefix("$ ").strip() for line in body.splitlines()]
        for part in " && ".join(line for line in lines if line and not line.startswith("#")).split(" && "):
            found.append(shlex.split(part))
    return found


def small(words):
    words = list(words)
    for i, word in enumerate(words[:-1]):
        if word in SMALL:
            words[i + 1] = str(min(int(words[i + 1]), SMALL[word]))
    return words + EXTRA.get(words[0], [])


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """An empty folder to run in; what a block registers or sets is undone."""
    monkeypatch.chdir(tmp_path)
    sweep = (ROOT / SWEEP).read_text()
    for pattern, value in (
        (r"total_steps = \S+", "total_steps = 4096"),
        (r", 3e-3, 1e-2\]", "]"),
        (r", 0\.3, 0\.4\]", "]"),
    ):
        sweep, found = re.subn(pattern, value, sweep)
        assert found == 1
    (tmp_path / SWEEP).parent.mkdir(parents=True)
    (tmp_path / SWEEP).write_text(sweep)
    # JAX is running already, or must start with the tests' own flags: other tests compare bits between processes.
    monkeypatch.setattr("jaxattr.host.cli.use_all_cores", lambda max_devices=None: "")
    monkeypatch.setattr(jaxattr, "use_all_cores", lambda max_devices=None: "")
    tables = (registry._registered, FILTERS, TARGETS, ESTIMATORS)
    saved = [dict(t) for t in tables]
    yield tmp_path
    for table, before in zip(tables, saved, strict=True):
        table.clear()
        table.update(before)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_commands_run(document, elsewhere, capsys):
    for words in commands(document):
        if Path(words[0]).name == "jaxattr":
            code = main(small(words[1:]))
            assert code == 0, f"{document}: `{shlex.join(words)}` exits with {code}: {capsys.readouterr().err}"
        else:
            known = any(re.fullmatch(pattern, " ".join(words)) for pattern in NOT_RUN)
            assert known, f"{document}: `{shlex.join(words)}` is neither run nor listed as not run"
    if document == "README.md":  # the main job leaves a picture and a table
        left = {p.name for p in (elsewhere / "runs" / "fl").iterdir()}
        assert {"comparison.png", "comparison.csv", "comparison.json", "none", "iif", "random"} <= left


@pytest.mark.parametrize("document", DOCUMENTS)
def test_code_blocks_run(document, elsewhere):
    namespace = {"__name__": "__main__"}
    for i, body in enumerate(blocks(document, ("python",))):
        exec(compile(body, f"{document}, block {i + 1}", "exec"), namespace)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_block_has_a_known_language(document):
    kinds = set(re.findall(r"^```(\w+)$", (ROOT / document).read_text(), re.M))
    assert kinds <= {"bash", "console", "python"}, f"{document}: nothing runs blocks of {sorted(kinds)}"


@pytest.mark.parametrize("document", DOCUMENTS)
def test_linked_files_exist(document):
    prose = re.sub(r"^```.*?^```$", "", (ROOT / document).read_text(), flags=re.M | re.S)
    links = re.findall(r"\]\(([^)#:]+)\)", prose)
    missing = [link for link in links if not (ROOT / link).exists()]
    assert not missing


def test_constraints_pin_versions_and_name_no_place():
    lines = [x for x in (ROOT / "constraints.txt").read_text().splitlines() if x and not x.startswith("#")]
    wrong = [x for x in lines if not re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.+!]+", x)]
    assert not wrong
    names = {re.split("==", x)[0].lower().replace("_", "-") for x in lines}
    needed = ("jax", "jaxlib", "flax", "optax", "gymnax", "brax", "tyro", "pytest", "ruff", "pyright", "wandb")
    assert not set(needed) - names


def test_citation_is_complete():
    text = (ROOT / "CITATION.cff").read_text()
    assert "2505.19281" in text
    if importlib.util.find_spec("yaml"):
        import yaml

        citation = yaml.safe_load(text)
        assert {"cff-version", "message", "title", "authors", "version", "references"} <= set(citation)
        from jaxattr.version import __version__

        assert citation["version"] == __version__
        assert len(citation["references"][0]["authors"]) == 8
