"""The page's arithmetic (src/view/page/stats.js, data.js) without a browser, in QuickJS or node: tables, ranges, groups of runs,
CSV, tokens."""

import json
import pathlib
import re
import shutil
import subprocess
import sys

try:
    import quickjs
except ImportError:
    quickjs = None

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "tests"))
from verlc_test import Tests  # noqa: E402

test = Tests()
POLYFILL = """
Array.prototype.at ??= function (i) { return this[i < 0 ? this.length + i : i]; };
Array.prototype.findLast ??= function (f) { return [...this].reverse().find(f); };
"""


class Page:
    """The modules' functions, called with JSON."""

    def __init__(self, *names):
        texts = [(ROOT / "src/view/page" / name).read_text() for name in names]
        self.source = POLYFILL + "".join(re.sub(r"^export ", "", text, flags=re.M) for text in texts)
        if quickjs:
            self.context = quickjs.Context()
            self.context.set_time_limit(30)
            self.context.set_memory_limit(256 << 20)
            self.context.eval(self.source)

    def __call__(self, script):
        if quickjs:
            return json.loads(self.context.eval(f"JSON.stringify({script})"))
        script = f"{self.source}\nconsole.log(JSON.stringify({script}))"
        return json.loads(
            subprocess.run(["node", "-"], input=script, capture_output=True, text=True, check=True, timeout=30).stdout
        )


def check_tables(page):
    rows = json.dumps([{"a": 2, "n": "x"}, {"a": None, "n": "b"}, {"a": 3, "n": "C"}, {"a": 2, "n": "a"}])

    def order(key, down):
        return page(f"sorted({rows}, (r, k) => r[k], '{key}', {json.dumps(down)}).map(r => r.n)")

    test("sorted: ascending, equal ones in their order, none last", order("a", False) == ["x", "a", "C", "b"], order("a", False))
    test("sorted: descending, none last too", order("a", True) == ["C", "x", "a", "b"], order("a", True))
    test(
        "words and tags",
        page(
            """[fitsWords("gsm 7b", "GSM8K on 7B"), fitsWords("gsm 1b", "GSM8K on 7B"), fitsWords("", "x"),
        fitsWords("#paper-run", "x", ["paper run"]), fitsWords("#paper", "x", ["paper run"]),
        fitsWords(tagWord("a  b"), "", ["a  b"])]"""
        )
        == [True, False, True, True, False, True],
    )
    test("matching names", page("""matching(["actor/kl_loss", "critic/kl", "actor/lr"], "KL act")""") == ["actor/kl_loss"])


def check_ranges(page):
    test(
        "a bound",
        page("""[bound("0.5"), bound(""), bound(null), bound(" "), bound("x"), bound("-1e-3"), bound("Infinity")]""")
        == [0.5, None, None, None, None, -0.001, None],
    )
    test(
        "in a range, both ends in it",
        page("""[0, 0.5, 1, null].map(s => [inRange({min: 0.5, max: 1}, s), inRange({min: null,
        max: 0.5}, s), inRange({min: null, max: null}, s)].map(Number).join(""))""") == ["011", "111", "101", "001"],
    )
    test(
        "few scores: a bin each",
        page("binned([1, 0, 0, 0.5], 20).map(b => [b.lo, b.hi, b.n])") == [[0, 0, 2], [0.5, 0.5, 1], [1, 1, 1]],
    )
    scores = [((i * 7919) % 1000) / 999 for i in range(1000)]
    bins = page(f"binned({scores}, 20)")
    inside = [sum(b["min"] <= s <= b["max"] for s in scores) for b in bins if b["n"]]
    test(
        "many scores: the closed range of a bin has its samples alone",
        len(bins) == 20 and sum(b["n"] for b in bins) == 1000 and inside == [b["n"] for b in bins if b["n"]],
        inside,
    )
    test("no scores", page("binned([], 20)") == [])


def check_configurations(page):
    config = json.dumps({"a": {"b": 1, "c": ["x", 2]}, "d": None, "e": "1e-6"})
    test("a tree as keys", page(f"flat({config})") == [["a.b", "1"], ["a.c", '["x",2]'], ["d", "null"], ["e", "1e-6"]])
    test(
        "which keys were set",
        page("""["a.b.c", "a", "a.bc", "d"].map(k => isSet(["a.b", "d"], k))""") == [True, False, False, True],
    )
    maps = """[["trainer.seed", 1, 1e-6, "/r/1"], ["trainer.seed", 2, 1e-6, "/r/2"], ["trainer.seed", 3, 1e-5, "/r/3"],
        ["data.seed", 1, 1e-6, "/r/4"]].map(([k, seed, lr, dir]) => new Map([[k, String(seed)], ["actor.lr", String(lr)],
        ["trainer.default_local_dir", dir]]))"""
    test("runs that differ in seeds alone", page(f"seedGroups({maps})") == [[0, 1, 3], [2]], page(f"seedGroups({maps})"))
    test(
        "a key that only looks like a seed",
        page("""seedGroups([["a.seedling", 1], ["a.seedling", 2]].map(x => new Map([x])))""") == [[0], [1]],
    )
    test("keys that differ", page(f"differing({maps}.slice(0, 2))") == ["trainer.default_local_dir", "trainer.seed"])


def check_series(page):
    a, b = {"step": [1, 2, 3], "value": [1, 2, 3]}, {"step": [2, 3, 4], "value": [4, None, 6]}
    band = page(f"bandOf({json.dumps([a, b])})")
    std = 2**0.5
    test(
        "mean and band of the steps that all have",
        band["step"] == [2]
        and band["mean"] == [3]
        and abs(band["lo"][0] - 3 + std) < 1e-12
        and abs(band["hi"][0] - 3 - std) < 1e-12,
        band,
    )
    test(
        "one run has no band's width",
        page(f"bandOf({json.dumps([a])})") == {"step": [1, 2, 3], "mean": [1, 2, 3], "lo": [1, 2, 3], "hi": [1, 2, 3]},
    )
    test("two metrics by step", page(f"paired({json.dumps(a)}, {json.dumps(b)})") == {"step": [2], "x": [2], "y": [4]})
    test(
        "correlation",
        page("[correlation([1, 2, 3], [2, 4, 6]), correlation([1, 2, 3], [3, 2, 1]), correlation([1, 1], [1, 2])]")
        == [1, -1, None],
    )
    test("a mean that keeps gaps", page("smooth([1, null, 3, 5], 2)") == [1, None, 3, 4], page("smooth([1, null, 3, 5], 2)"))


def check_export(page):
    csv = page("""csvOf([{name: 'a,"b"', x: [2, 1], raw: [20, NaN]}, {name: "=1+1", x: [3], raw: [0.1], smooth: [0.2],
        band: {lo: [0], hi: [1]}}], "step")""")
    test(
        "CSV",
        csv == 'step,"a,""b""",\'=1+1,\'=1+1 (mean),\'=1+1 (low),\'=1+1 (high)\r\n1,,,,,\r\n2,20,,,,\r\n3,,0.1,0.2,0,1\r\n',
        csv,
    )
    names = page(
        """[fileName("critic/rewards/mean", "csv"), fileName("../../x y", "png"), fileName("../", "png"), fileName("", "png")]"""
    )
    test("a file's name leads nowhere", names == ["critic_rewards_mean.csv", "x_y.png", "plot.png", "plot.png"], names)


def check_tokens(page):
    special = json.dumps({"1": "<|im_start|>", "2": "<|im_end|>"})
    got = page(f"tokenTexts([1, 10, 11, 12, 2], [0, 4, 4, 6, 6], 'user€!', {special})")
    test(
        "special tokens by name; a part of a character has no text",
        got
        == [
            {"text": "<|im_start|>", "special": True},
            {"text": "user", "special": False},
            {"text": "", "special": False},
            {"text": "€!", "special": False},
            {"text": "<|im_end|>", "special": True},
        ],
        got,
    )
    old = page("tokenTexts([10, 2], [2, 2], 'ok', undefined)")
    test("of an older run.db the last token by its id", old[1] == {"text": "⟨2⟩", "special": True}, old)
    test("without boundaries the ids", page("tokenTexts([10, 2], null, 'ok', undefined).map(t => t.text)") == ["10 ", "2 "])


def check_turns(page):
    episode = {"calls": [{"segment": 0, "name": "add"}, {"segment": 0, "name": "find"}, {"segment": 2, "name": "add"}, 7, None]}
    got = page(f"turnsOf(9, [[3, 'policy'], [2, 'environment'], [4, 'policy']], {json.dumps(episode)})")
    short = [(t["who"], t["from"], t["to"], [c["name"] for c in t["calls"]], [c["name"] for c in t["results"]])
             for t in got["turns"]]
    want = [("policy", 0, 3, ["add", "find"], []), ("environment", 3, 5, [], ["add", "find"]), ("policy", 5, 9, ["add"], [])]
    test("turns with their calls and results", short == want and [c["number"] for c in got["left"]] == [2], got)
    one = page("turnsOf(4, undefined, {calls: 5})")
    alone = {"who": "policy", "from": 0, "to": 4, "calls": [], "results": []}
    test("a response of one turn", one == {"turns": [alone], "left": []}, one)
    samples = [{"turns": 4, "tools": ["add", "find"], "failed": 1}, {"turns": 2, "tools": [], "failed": 0}, {}]
    open_ = {"tool": "", "failed": False, "least": None, "most": None}
    for more, fit in (({}, [1, 1, 1]), ({"tool": "find"}, [1, 0, 0]), ({"failed": True}, [1, 0, 0]), ({"least": 3}, [1, 0, 0]),
                      ({"most": 3}, [0, 1, 0]), ({"tool": "add", "most": 3}, [0, 0, 0])):
        got = page(f"{json.dumps(samples)}.map(s => +fitsTurns({json.dumps(open_ | more)}, s))")
        test(f"samples with {more}", got == fit, got)
    test("the tools of a step", page(f"toolsOf({json.dumps(samples)})") == ["add", "find"])


def check_phases(page):
    names = ["timing_s/step", "timing_s/start", "timing_s/gen", "timing_s/update_weights", "timing_s/agent_loop/num_preempted/max",
             "timing_s/old_log_prob", "perf/time_per_step"]
    got = page(f"{json.dumps(names)}.filter(isPhase)")
    test("the phases of a step, and no part of one", got == ["timing_s/gen", "timing_s/old_log_prob"], got)


def main():
    if not quickjs and not shutil.which("node"):
        print("skipped: neither the Python package quickjs nor node is here")
        sys.exit(77)
    page = Page("stats.js", "data.js")
    check_tables(page)
    check_ranges(page)
    check_configurations(page)
    check_series(page)
    check_export(page)
    check_tokens(page)
    check_turns(page)
    check_phases(page)
    test.end()


main()
