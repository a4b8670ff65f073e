"""W&B: a run's metrics and its tables of validation samples, and whether somebody is logged in.

The project is trainer.project_name and the run's name trainer.experiment_name, as in verl.  A record is sent once W&B's own
process has written it down; from there W&B uploads it.  The run is opened by its id again, after a failure or a resume.
"""

import configparser
import glob
import netrc
import os
import time
import urllib.parse
import uuid

from verlc_helpers.tracker import Client

OFFLINE = ("offline", "dryrun", "disabled")  # WANDB_MODE without a server
FLUSH_S = 0.3  # how often W&B's process writes its file


class Wandb(Client):
    def open(self, run_id):
        import wandb

        run_id = run_id or os.environ.get("WANDB_RUN_ID") or uuid.uuid4().hex[:8]
        settings = {"console": "off", "program": "verlc", "disable_code": True}
        if self.args.get("proxy"):
            settings["https_proxy"] = self.args["proxy"]
        self.flushes = "x_transaction_log_flush_interval" in getattr(wandb.Settings, "model_fields", ())
        if self.flushes:
            settings["x_transaction_log_flush_interval"] = FLUSH_S  # W&B's own is 15 s: what a kill would cost
        self.run = wandb.init(project=self.project, name=self.experiment, entity=os.environ.get("WANDB_ENTITY"),
                              config=self.args["config"], id=run_id, resume="allow", settings=wandb.Settings(**settings))
        self.table_rows = []
        return self.run.id

    def put_all(self, records):
        """Those are with the client that its own process has written down: one that has died by then fails here."""
        done, error, refused = super().put_all(records)
        if self.flushes and done and error is None:
            try:
                time.sleep(FLUSH_S + 0.2)
                list(self.run.summary.keys())
            except Exception as died:
                return 0, died, []
        return done, error, refused

    def metrics(self, step, data, at):
        self.run.log(data, step=step, commit=True)  # a step's metrics are its last record

    def generations(self, step, rows, at):
        import wandb

        columns = ["step"] + [f"{what}_{i + 1}" for i in range(len(rows)) for what in ("input", "output", "score")]
        self.table_rows = [r for r in self.table_rows if len(r) == len(columns)]  # a table has one width
        self.table_rows.append([step] + [value for row in rows for value in row])
        self.run.log({"val/generations": wandb.Table(columns=columns, data=self.table_rows)}, step=step)

    def finish(self, how, ended):
        settings = self.run.settings
        self.run.finish(exit_code=0 if how == "done" else 1)
        if settings.mode not in OFFLINE[:2]:
            return None
        parts = os.path.join(os.path.dirname(settings.sync_dir), f"offline-run-*-{self.run.id}")  # one for each start
        where = f"--append {parts}" if len(glob.glob(parts)) > 1 else settings.sync_dir
        return f"this run of W&B is offline; 'wandb sync {where}' uploads it"

    def drop(self):
        import wandb

        wandb.teardown()


def wandb_settings():
    """Those of W&B's two settings files, the directory's own in front."""
    found = {}
    home = os.environ.get("WANDB_CONFIG_DIR") or os.path.join(os.path.expanduser("~"), ".config", "wandb")
    for path in (os.path.join(home, "settings"), os.path.join(os.environ.get("WANDB_DIR") or ".", "wandb", "settings")):
        parser = configparser.ConfigParser(interpolation=None)
        parser.read(path)
        found |= dict(parser["default"]) if parser.has_section("default") else {}
    return found


def netrc_hosts():
    home = os.path.expanduser("~")
    paths = [os.environ.get("NETRC"), os.path.join(home, ".netrc"), os.path.join(home, "_netrc")]
    for path in paths:
        if path and os.path.exists(os.path.expanduser(path)):
            return netrc.netrc(os.path.expanduser(path)).hosts
    return {}


def wandb_logged_in():
    """Whether W&B finds a key, or needs none. Where its files cannot be read W&B itself is left to say so."""
    try:
        settings = wandb_settings()
        mode = os.environ.get("WANDB_MODE") or settings.get("mode")
        url = os.environ.get("WANDB_BASE_URL") or settings.get("base_url") or "https://api.wandb.ai"
        keys = [os.environ.get("WANDB_API_KEY"), os.environ.get("WANDB_IDENTITY_TOKEN_FILE"), settings.get("api_key"),
                settings.get("identity_token_file")]
        return mode in OFFLINE or any(keys) or urllib.parse.urlsplit(url).netloc in netrc_hosts()
    except (configparser.Error, netrc.NetrcParseError, OSError, UnicodeError):
        return True
