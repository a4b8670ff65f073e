"""Data set classes of the user (data.custom_cls): verl's RLHFDataset overridden as verl-recipe does it, a class of rows of its own,
and what goes wrong."""

import json
import pathlib
import sqlite3
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from verlc_test import Scratch, Tests, run  # noqa: E402

CLASSES = '''
from verl.utils.dataset import RLHFDataset
from verl.utils.dataset.rl_dataset import RLHFDataset as Same, collate_fn

assert Same is RLHFDataset

def as_question(row, source):
    return {"data_source": source, "prompt": [{"role": "user", "content": row["prompt"][0]["content"] + " Think."}]}

class Overridden(RLHFDataset):
    """Makes other prompts of the files' rows, as retool does."""

    def _read_files_and_tokenize(self):
        super()._read_files_and_tokenize()
        assert self.config.max_prompt_length == self.max_prompt_length == 64 and self.tokenizer.encode("1")
        self.dataframe = self.dataframe.map(as_question, fn_kwargs={"source": "openai/gsm8k"}, remove_columns=["ability"])
        self.dataframe = self.dataframe.filter(lambda row: row["extra_info"]["index"] != 1)

class Own:
    """Rows that are in no file; a tensor is none of a row."""

    def __init__(self, data_files, tokenizer, processor=None, config=None, **kwargs):
        import numpy
        self.of = numpy.int64(len(open(data_files[0]).readlines()))

    def __len__(self):
        return 6

    def __getitem__(self, i):
        if i == 5 and "fails" in __file__:
            raise RuntimeError("no sixth row")
        return {"raw_prompt": [{"role": "user", "content": f"What is {i}?"}], "data_source": "openai/gsm8k", "dummy": object(),
                "reward_model": {"ground_truth": str(i)}, "extra_info": {"index": i, "lines": self.of}}

def function():
    pass
'''


def args_of(s, name, cls, path="classes.py", **keys):
    return s.ppo(name, **{"data.custom_cls.path": s.dir / path, "data.custom_cls.name": cls, "data.val_files": "null",
                          "trainer.device": "cpu", "trainer.total_training_steps": 1, "trainer.save_freq": 0,
                          "data.train_files": s.dir / "few.jsonl", "data.shuffle": False, **keys})


def prompts(d):
    with sqlite3.connect(d / "run.db") as db:
        return [r[0] for r in db.execute("SELECT DISTINCT prompt FROM samples ORDER BY uid")]


def main():
    test = Tests()
    with Scratch() as s:
        (s.dir / "classes.py").write_text(CLASSES)
        (s.dir / "fails.py").write_text(CLASSES)
        s.write("few.jsonl", [s.row(i) for i in range(6)])
        said = run(*args_of(s, "overridden", "Overridden")).stderr
        got = prompts(s.dir / "overridden")
        test("a subclass of RLHFDataset says which prompts there are", len(got) == 4 and all("Think." in p for p in got), got)
        test("rows that it drops are gone", "5 rows, 5 used" in said and "What is 1 + 2?" not in "".join(got), said[-400:])
        run(*args_of(s, "capped", "Overridden", **{"data.train_max_samples": 5}))
        test("it keeps max_samples itself", prompts(s.dir / "capped") == got)
        run(*args_of(s, "own", "Own"))
        got = prompts(s.dir / "own")
        test("a class of rows of its own", ["What is 0?" in got[0], "What is 3?" in got[3]] == [True] * 2, got)
        test.refused("a row that raises", run(*args_of(s, "x", "Own", "fails.py"), check=False), 3, "data.train_files", "row 5",
                     "no sixth row")
        test.refused("no class", run(*args_of(s, "x", "function"), check=False), 3, "no class 'function'")
        test.refused("no name", run(*args_of(s, "x", "null"), check=False), 3, "no class")
        test.refused("no file", run(*args_of(s, "x", "Own", "none.py"), check=False), 3, "none.py")
        (s.dir / "wrong.py").write_text("import nothing_of_this_name\n")
        test.refused("a file that does not load", run(*args_of(s, "x", "Own", "wrong.py"), check=False), 3, "nothing_of_this_name")
        (s.dir / "bare.py").write_text("class Bare(list):\n    def __init__(self, **k):\n        super().__init__([{'x': 1}])\n")
        test.refused("rows without a prompt", run(*args_of(s, "x", "Bare", "bare.py"), check=False), 3, "row 1", "prompt")
        (s.dir / "exits.py").write_text("import os\nclass Exits(list):\n    def __init__(self, **k):\n        os._exit(3)\n")
        test.refused("one that ends its process", run(*args_of(s, "x", "Exits", "exits.py"), check=False), 1, "exit code 3")
    test.end()


main()
