"""The report of a run: its numbers are the run's, nothing escapes into the markup, and it works in a browser."""

from __future__ import annotations

import base64
import csv
import dataclasses
import html
import io
import json
import re
import shutil
import subprocess

import numpy as np
import pytest
from PIL import Image

import jaxattr
from jaxattr.config import Config, ConfigError
from jaxattr.host import report as module
from jaxattr.host.report import curve, histogram, lane_labels, main, page, report, spread, tail_scale
from jaxattr.host.rounds import load_round, path_of

SMALL = {
    "num_envs": 4, "num_steps": 16, "minibatch_size": 16, "num_epochs": 2, "hidden": (8,), "eval_episodes": 4,
    "eval_every": 1,
}  # fmt: skip
CONFIG = Config(total_steps=4 * 64, filter="iif", p=0.5, normalize_obs=True, **SMALL)
CHROMIUM = next((p for n in ("chromium", "chromium-browser", "google-chrome") if (p := shutil.which(n))), None)
needs_browser = pytest.mark.skipif(
    CHROMIUM is None, reason="no chromium, chromium-browser or google-chrome on the PATH"
)
TEMPLATE = (module.resources.files("jaxattr.host") / "report.html").read_text()


def embedded(path):
    (text,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', path.read_text(), re.DOTALL)
    return json.loads(text)


def copy_of(run, tmp_path, *leave_out):
    return shutil.copytree(
        run, tmp_path / "copy", ignore=shutil.ignore_patterns("checkpoints", "tensorboard", "report.html", *leave_out)
    )


@pytest.fixture(scope="module")
def cartpole(tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "cartpole"
    jaxattr.train("CartPole-v1", CONFIG, seeds=2, out=out, record_rounds=(2, 3, 4))
    return out


@pytest.fixture(scope="module")
def made(cartpole):
    return report(cartpole, top=3)


@pytest.fixture(scope="module")
def data(made):
    return embedded(made)


@pytest.fixture(scope="module")
def lake(tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "lake"
    jaxattr.train("FrozenLake-misc", CONFIG, seeds=1, out=out, record_rounds=(4,))
    return out


@pytest.fixture(scope="module")
def plain_run(tmp_path_factory):
    """No filter, no scores, no recorded round; a one-step environment that has no drawing."""
    out = tmp_path_factory.mktemp("runs") / "plain"
    jaxattr.train("probe/constant", Config(total_steps=2 * 64, **SMALL), seeds=1, out=out)
    return out


# -- numbers -------------------------------------------------------------------------------------------------------


def test_curves_and_quantiles_are_those_of_metrics_csv(cartpole, data):
    with (cartpole / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    for name in ("return_mean", "test_return"):
        shown = data["curves"][name]
        for lane in (0, 1):
            want = {int(r["env_steps"]): float(r[name] or "nan") for r in rows if r["lane"] == str(lane)}
            got = np.array(shown["lanes"][lane], float)  # None becomes nan
            np.testing.assert_allclose(got, [want[x] for x in shown["x"]], rtol=1e-5)
        both = np.array(shown["lanes"], float)
        np.testing.assert_allclose(np.array(shown["mean"], float), np.nanmean(both, axis=0), rtol=1e-5)
        np.testing.assert_allclose(np.array(shown["low"], float), np.nanmin(both, axis=0), rtol=1e-5)
        np.testing.assert_allclose(np.array(shown["high"], float), np.nanmax(both, axis=0), rtol=1e-5)
    assert data["curves"]["test_return"]["x"] == [64, 128, 192, 256]
    for lane in (0, 1):
        mine = [r for r in rows if r["lane"] == str(lane)]
        shown = data["rounds"]["lanes"][lane]
        assert data["rounds"]["x"] == [int(r["update"]) for r in mine]
        for q, name in enumerate(module.QUANTILES):
            np.testing.assert_allclose(shown["quantiles"][q], [float(r[name]) for r in mine], rtol=1e-5)
        share = [float(r["kept"]) / (float(r["kept"]) + float(r["dropped"])) for r in mine]
        np.testing.assert_allclose(shown["kept"], share, rtol=1e-5)


def test_cards_are_the_rows_of_records_csv(cartpole, data):
    with (cartpole / "records.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [r["round"] for r in data["recorded"]] == [2, 3, 4]
    for shown in data["recorded"]:
        for lane, of_lane in enumerate(shown["lanes"]):
            mine = [r for r in rows if (r["round"], r["lane"]) == (str(shown["round"]), str(lane))]
            assert len(of_lane["top"]) == len(of_lane["bottom"]) == 3
            for card, row in zip(of_lane["top"] + of_lane["bottom"], mine[:3] + mine[:-4:-1], strict=True):
                for name in ("rank", "record", "score", "action", "reward", "advantage", "value"):
                    assert card[name] == pytest.approx(float(row[name]), rel=1e-6)
                for name in ("kept", "terminated", "truncated"):
                    assert str(card[name]) == row[name]
                assert card["action_name"] == ("left", "right")[card["action"]]


def test_points_histogram_and_observations_are_the_records(cartpole, data):
    for shown in data["recorded"]:
        whole = load_round(path_of(cartpole, shown["round"]))
        for lane, of_lane in enumerate(shown["lanes"]):
            one = whole.lane(lane)
            scores, kept = np.asarray(one.scores), np.asarray(one.weights) > 0
            assert (of_lane["records"], of_lane["kept"]) == (64, kept.sum())
            assert of_lane["negative"] == (scores < 0).sum()
            points = np.array(of_lane["points"])
            np.testing.assert_array_equal(points[:, 3], np.arange(64))
            np.testing.assert_allclose(points[:, 0], one.records.advantage, rtol=1e-5)
            np.testing.assert_allclose(points[:, 1], scores, rtol=1e-5)
            np.testing.assert_array_equal(points[:, 2], kept)
            assert sum(of_lane["histogram"]["kept"]) == kept.sum()
            assert sum(of_lane["histogram"]["dropped"]) == (~kept).sum()
            seen = np.asarray(one.rollout.obs).reshape(64, -1)  # as the environment gave them, not normalised
            for card in of_lane["top"]:
                np.testing.assert_allclose(np.array(card["obs"].split(), float), seen[card["record"]], rtol=1e-3)


def test_pictures_are_kept_once(lake, data):
    for shown in (data, embedded(report(lake, top=20))):
        cards = [c for r in shown["recorded"] for x in r["lanes"] for end in ("top", "bottom") for c in x[end]]
        assert {c["image"] for c in cards} == set(range(len(shown["images"])))
        assert len(set(shown["images"])) == len(shown["images"])
        for uri in shown["images"]:
            picture = Image.open(io.BytesIO(base64.b64decode(uri.removeprefix("data:image/png;base64,"))))
            assert picture.format == "PNG"
            assert len(picture.convert("RGB").getcolors(100_000) or ()) > 3
    assert len(cards) == 40
    assert len(shown["images"]) < 40
    same = {(c["obs"], c["action"]): c["image"] for c in cards}  # one state and action, one picture
    assert all(same[c["obs"], c["action"]] == c["image"] for c in cards)
    assert len(set(same.values())) == len(same)
    assert all(c["alike"] >= sum((d["obs"], d["action"]) == (c["obs"], c["action"]) for d in cards) for c in cards)


@pytest.mark.parametrize("kind", ["normal", "heavy tails", "all positive", "constant", "zero"])
def test_every_score_is_in_its_bin(kind):
    rng = np.random.default_rng(0)
    x = rng.normal(size=500)
    scores = {"normal": x, "heavy tails": x**9, "all positive": 5 + abs(x), "constant": 0 * x - 2, "zero": 0 * x}[kind]
    kept = scores >= np.quantile(scores, 0.2)
    h = histogram(scores, kept)
    edges, total = np.array(h["edges"]), np.array(h["kept"]) + h["dropped"]
    assert np.all(np.diff(edges) > 0)
    assert len(edges) == len(total) + 1 <= module.BINS + 3
    assert total.sum() == 500
    assert (h["tail"] is not None) == (kind == "heavy tails") == (tail_scale(scores) is not None)
    if kind in ("normal", "heavy tails"):
        zero = np.flatnonzero(edges == 0)[0]  # negative scores and others never share a bar
        assert total[:zero].sum() == (scores < 0).sum()
        slack = 1e-5 * abs(edges)
        for i in range(len(total)):
            inside = (scores >= edges[i] - slack[i]) & (scores <= edges[i + 1] + slack[i + 1])
            assert inside.sum() >= total[i]


def test_long_runs_are_thinned():
    assert spread(3, 10) == [0, 1, 2]
    assert spread(1000, 5) == [0, 250, 500, 749, 999]
    assert spread(7, 1) == [6]
    values = np.full((2, 5000), np.nan)
    values[0, ::2] = np.arange(2500)
    shown = curve({"env_steps": list(range(5000)), "test_return": values}, "test_return")
    assert len(shown["x"]) == module.ROUNDS_DRAWN
    assert (shown["x"][0], shown["x"][-1]) == (0, 4998)
    assert shown["lanes"][1] == [None] * module.ROUNDS_DRAWN
    assert shown["mean"] == shown["lanes"][0]


def test_fewer_rounds_and_seeds_on_request(cartpole, tmp_path):
    shown = embedded(report(cartpole, tmp_path / "new" / "few.html", top=1, max_rounds=2, max_seeds=1))
    assert [r["round"] for r in shown["recorded"]] == [2, 4]
    assert shown["recorded_total"] == 3
    assert (len(shown["lanes"]), shown["lanes_with_scores"], len(shown["recorded"][0]["lanes"])) == (2, 1, 1)


def test_header(data):
    head = data["header"]
    assert (head["env"], head["seeds"], head["filter"]) == ("CartPole-v1", [0, 1], "iif, p = 0.5, compact training")
    assert len(head["final"]) == 2
    assert head["versions"]["jaxattr"] == jaxattr.__version__
    changed = {c["name"]: (c["value"], c["default"]) for c in head["changed"]}
    assert changed["p"] == ("0.5", "0.125")
    assert changed["hidden"] == ("8", "64, 64")
    assert "gamma" not in changed
    assert lane_labels({"seeds": [3, 3], "sweep": {"p": [0.1, 0.5]}})[1] == {"seed": 3, "label": "seed 3, p 0.5"}


# -- the file ------------------------------------------------------------------------------------------------------


def test_nothing_gets_out_of_the_data():
    nasty = {"</script><script>alert(1)</script>": "<!-- & \u2028 ' \" \\ </SCRIPT>", "none": None}
    text = page(nasty)
    assert text.lower().count("</script") == TEMPLATE.lower().count("</script")
    assert "alert(1)" in text
    assert "<script>alert" not in text
    (inside,) = re.findall(r'id="data">(.*?)</script>', text, re.DOTALL)
    assert json.loads(inside) == nasty
    with pytest.raises(ValueError):
        page({"x": float("nan")})


def test_the_page_needs_nothing_from_elsewhere(made):
    text = made.read_text()
    assert set(re.findall(r"[a-z]+://[^\"'\s<)]*", text)) == {"http://www.w3.org/2000/svg"}
    assert "default-src 'none'" in text
    assert not re.findall(r"<(?:link|iframe|script[^>]+src)", text)
    assert TEMPLATE.count(module.PLACEHOLDER) == 1


def test_command(cartpole, tmp_path, capsys):
    out = tmp_path / "r.html"
    assert main([str(cartpole), "--out", str(out), "--top", "1", "--max-rounds", "1", "--quiet"]) == 0
    assert re.fullmatch(r".*r\.html: \d\.\d\d MB", capsys.readouterr().out.strip())
    assert [p.name for p in tmp_path.iterdir()] == ["r.html"]


# -- missing pieces ------------------------------------------------------------------------------------------------


def test_a_run_without_rounds_scores_or_summary(plain_run, tmp_path):
    folder = copy_of(plain_run, tmp_path, "summary.json")
    shown = embedded(report(folder))
    assert shown["recorded"] == shown["images"] == shown["studies"] == []
    assert not shown["header"]["finished"]
    assert shown["header"]["versions"] == {"jaxattr": jaxattr.__version__}
    assert shown["rounds"]["lanes"][0]["quantiles"] == [[None, None]] * 5


def test_an_environment_without_drawing_gives_numbers(tmp_path):
    config = Config(total_steps=2 * 64, filter="iif", **SMALL)
    jaxattr.train("probe/constant", config, seeds=1, out=tmp_path / "run", record_rounds=(1,))
    shown = embedded(report(tmp_path / "run"))
    (lane,) = shown["recorded"][0]["lanes"]
    assert shown["undrawn"] == "jaxattr has no drawing of probe/constant"
    assert {c["image"] for c in lane["top"]} == {None}
    assert {c["obs"] for c in lane["top"]} == {"0"}


def test_rounds_without_scores_say_so(cartpole):
    whole = load_round(path_of(cartpole, 2))
    draw = module.Drawer(whole.env, whole.env_id)
    unscored = dataclasses.replace(whole, data=whole.data.replace(scores=np.full((2, 64), np.nan)))
    assert "--score-always" in module.lane_data(unscored, 0, 2, draw)["note"]
    before = whole.data.before.replace(alive=np.zeros(2, bool))
    stopped = dataclasses.replace(whole, data=whole.data.replace(before=before))
    assert "had stopped" in module.lane_data(stopped, 1, 2, draw)["note"]


def test_studies_are_embedded(cartpole, tmp_path):
    folder = copy_of(cartpole, tmp_path, "rounds")
    for name in ("diagnosis/round_000002", "counterfactual/round_000002", "behaviour", "intervention"):
        (folder / name).mkdir(parents=True)
        file = folder / name / f"{name.split('/')[0]}.png"
        Image.new("RGB", (4, 4), "red").save(file)
        file.with_suffix(".json").write_text(
            json.dumps({"round": 2, "rounds": [{}], "seeds": [0, 1], "command": f"do <{name}>"})
        )
    (folder / "behaviour" / "behaviour.json").write_text("{damaged")
    (folder / "intervention" / "half.png").write_bytes(b"no picture")
    found = embedded(report(folder))["studies"]
    assert [s["kind"] for s in found] == ["diagnosis", "counterfactual", "behaviour", "intervention"]
    assert found[0]["file"] == "diagnosis/round_000002/diagnosis.png"
    assert found[0]["details"] == ["round: 2", "seeds: 0, 1", "command: do <diagnosis/round_000002>"]
    assert found[2]["details"] == []
    assert all(s["image"].startswith("data:image/png;base64,iVBOR") for s in found)


def test_bad_input_is_one_line(cartpole, tmp_path):
    for options, message in (
        (["--top", "0"], "--top is 0: must be 1 or more"),
        (["--max-rounds", "-1"], "--max-rounds is -1: must be 1 or more"),
        (["--max-seeds", "0"], "--max-seeds is 0"),
        (["--out", str(tmp_path)], "is a folder; name a file"),
    ):
        with pytest.raises(ConfigError, match=message):
            main([str(cartpole), *options])
    with pytest.raises(ConfigError, match="holds no run"):
        report(tmp_path / "nothing")
    with pytest.raises(ConfigError, match="holds no run"):
        report(cartpole / "metrics.csv")
    folder = copy_of(cartpole, tmp_path)
    path_of(folder, 3).write_bytes(path_of(folder, 3).read_bytes()[:5000])
    with pytest.raises(ConfigError, match="not a readable round"):
        report(folder)
    (folder / "metrics.csv").write_text("a,b\n1,2\n")
    with pytest.raises(ConfigError, match="holds no finished round"):
        report(folder)
    (folder / "metrics.csv").write_text("update,env_steps\n1,2\n")
    with pytest.raises(ConfigError, match="not a run's metrics"):
        report(folder)
    (folder / "metrics.csv").unlink()
    with pytest.raises(ConfigError, match="no round of this run is finished"):
        report(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config\.json: not readable"):
        report(folder)
    assert not list(folder.glob("*report*"))


# -- in a browser --------------------------------------------------------------------------------------------------


def browse(path, fragment, profile):
    """What the page's `#selftest` reports after acting as a reader would."""
    words = [
        CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
        "--disable-background-networking", "--disable-component-update", f"--user-data-dir={profile}",
        "--window-size=1280,900", "--virtual-time-budget=10000", "--dump-dom", f"{path.resolve().as_uri()}#{fragment}",
    ]  # fmt: skip
    dom = subprocess.run(words, capture_output=True, text=True, timeout=180, check=True).stdout
    found = re.search(r'data-selftest="([^"]*)"', dom)
    assert found, dom[:2000]
    return json.loads(html.unescape(found[1]))


@needs_browser
def test_a_reader_can_choose_rounds_and_seeds(made, data, tmp_path):
    seen = browse(made, "round=3&seed=1&selftest", tmp_path)
    assert seen["errors"] == []
    assert seen["overflow"] <= 0
    assert (seen["start"]["round"], seen["start"]["lane"]) == (3, 1)
    assert seen["start"]["heading"] == "4. Records of round 3, seed 1"
    assert (seen["mark"]["round"], seen["mark"]["lane"], seen["mark"]["marks"]) == (2, 1, 3)  # first dot of the chart
    assert seen["button"]["round"] == 4
    assert (seen["key"]["round"], seen["key"]["pressed"]) == (3, ["3", "1"])  # arrow left from 4
    assert seen["lane"]["lane"] == 1
    for step in ("start", "mark", "button", "key"):
        now = seen[step]
        (one,) = [r for r in data["recorded"] if r["round"] == now["round"]]
        of_lane = one["lanes"][now["lane"]]
        assert now["records"] == [c["record"] for c in of_lane["top"] + of_lane["bottom"]]
        filled = np.array(of_lane["histogram"]["kept"]) + of_lane["histogram"]["dropped"] > 0
        assert (now["bins"], now["points"]) == (filled.sum(), 64)
        assert now["images"] == now["cards"] == 6
    assert seen["narrowest"] > 50
    assert len(seen["tips"]) == 6
    assert "env steps\nmean" in seen["tips"][0]
    assert "kept" in seen["tips"][-1]


@needs_browser
def test_pages_without_rounds_and_with_nasty_words_work(plain_run, tmp_path):
    folder = copy_of(plain_run, tmp_path, "learning_curve.png")
    summary = json.loads((folder / "summary.json").read_text())
    nasty = "</script><img src=x onerror=\"console.error('ran')\">"
    (folder / "summary.json").write_text(json.dumps({**summary, "device": nasty, "versions": {"jaxattr": nasty}}))
    (folder / "behaviour").mkdir()
    Image.new("RGB", (90, 60), "red").save(folder / "behaviour" / "behaviour.png")
    seen = browse(report(folder), "selftest", tmp_path / "profile")
    assert seen["errors"] == []
    assert seen["start"]["round"] is None
    assert (seen["start"]["marks"], seen["start"]["cards"], seen["start"]["studies"]) == (0, 0, 1)
    assert seen["start"]["heading"] == "4. Records of a round"
