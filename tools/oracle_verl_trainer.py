"""verl 0.9.1's own PPO and SFT trainers in one process on a CPU, in fp64, for oracle_steps.py.

Replaced is what needs a GPU or a cluster: the platform (verl's own plug-in point), TransferQueue (a dict),
FSDP's wrapping (the bare module), collectives (a world of one), the engines that generate. All else is
verl's: PPOTrainer.step and what it calls, the FSDP engine's workers, losses, optimizers, schedules, metrics,
its YAML.
"""
import contextlib
import io
import logging
import os
import pathlib
import sys
import types
import warnings
from functools import partial

os.environ.update(VERL_PLATFORM="cpu", VERL_ENGINE_DEVICE="cuda", VERL_ENGINE_VENDOR="nvidia", WORLD_SIZE="1",
                  RANK="0", LOCAL_RANK="0", MASTER_ADDR="localhost", MASTER_PORT="1",
                  HF_HUB_DISABLE_PROGRESS_BARS="1", TQDM_DISABLE="1", VERL_LOGGING_LEVEL="ERROR",
                  TRANSFORMERS_VERBOSITY="error")
warnings.simplefilter("ignore")
logging.disable(logging.WARNING)

import numpy as np  # noqa: E402
import oracle_data  # noqa: E402
import oracle_verl  # noqa: E402
import torch  # noqa: E402
from hydra import compose, initialize_config_dir  # noqa: E402


class Batch:
    """TransferQueue's KVBatchMeta: rows of the store below, by key."""
    def __init__(self, partition_id="train", keys=(), tags=()):
        self.partition_id, self.keys, self.tags, self.extra_info = partition_id, list(keys), list(tags), {}

    def __len__(self):
        return len(self.keys)

    def reorder(self, order):
        self.keys, self.tags = [self.keys[i] for i in order], [self.tags[i] for i in order]


class Store:
    """TransferQueue's key-value calls on a dict of rows."""
    def __init__(self):
        self.rows, self.tags = {}, {}

    def kv_batch_get(self, keys, partition_id="train", select_fields=None):
        from verl.utils.tensordict_utils import list_of_dict_to_tensordict

        names = [n for n in (select_fields or self.rows[keys[0]]) if all(n in self.rows[k] for k in keys)]
        td = list_of_dict_to_tensordict([{n: self.rows[k][n] for n in names} for k in keys])
        for n in names:  # rows of equal lengths make a plain tensor there; in TransferQueue all are jagged
            if torch.is_tensor(self.rows[keys[0]][n]):
                td[n] = torch.nested.as_nested_tensor([self.rows[k][n] for k in keys], layout=torch.jagged)
        return td

    def kv_batch_put(self, keys, partition_id="train", fields=None, tags=None):
        self.tags.update(zip(keys, tags or []))
        for name, value in fields.items() if fields is not None else ():
            for k, v in zip(keys, value.unbind(), strict=True):
                self.rows[k][name] = v.detach()
        return Batch(partition_id, keys, [self.tags[k] for k in keys])


STORE = Store()


class Device(types.ModuleType):
    """The device module of verl's platform: a CPU that has used no memory."""
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        answer = {"get_device_name": "CPU", "mem_get_info": (0, 0)}.get(name, 0)
        return lambda *_, **__: answer


def cpu_platform():
    import verl.plugin.platform as platform

    base = platform.PlatformBase
    facts = {"device_name": "cpu", "vendor_name": "nvidia", "device_module": Device("cpu")}
    calls = {
        "current_device": "cpu", "communication_backend_name": "gloo", "ray_noset_envvars": [],
        "visible_devices_envvar": "CUDA_VISIBLE_DEVICES"
    }
    body = {n: property(lambda self, v=v: v) for n, v in facts.items()}
    body.update(
        {n: lambda self, *a, v=calls.get(n, False), **k: v
         for n in base.__abstractmethods__ - set(facts)})
    platform.set_platform(type("Cpu", (base, ), body)())


def stand_in():
    """Lets verl's trainers import and run here, and makes them compute in fp64."""
    queue = types.ModuleType("transfer_queue")
    queue.KVBatchMeta, queue.BatchMeta = Batch, type("BatchMeta", (), {})
    queue.kv_batch_get, queue.kv_batch_put = STORE.kv_batch_get, STORE.kv_batch_put
    sys.modules["transfer_queue"] = queue
    oracle_verl.ABSENT |= {"cachetools", "aiohttp", "fastapi", "uvicorn", "openai", "zmq", "math_verify"}
    sys.meta_path.append(oracle_verl.Absent())
    cpu_platform()
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    torch.distributed.all_reduce = lambda *_, **__: None  # of one rank; gloo has no AVG

    import verl.workers.engine.fsdp.transformer_impl as fsdp
    from transformers import AutoModelForTokenClassification

    def bare(self, module):
        self._autocast_dtype, self.scaler = torch.float32, None  # float32: no autocast
        # pad-row (docs/differences.md)
        module.get_input_embeddings().padding_idx = None
        return module.double()

    fsdp.FSDPEngine._build_fsdp_module = bare
    fsdp.FSDPCheckpointManager = lambda **_: None
    load = AutoModelForTokenClassification.from_pretrained  # verl insists on flash attention
    AutoModelForTokenClassification.from_pretrained = lambda *a, **k: load(
        *a, **{**k, "attn_implementation": "sdpa"})


def widen(archs):
    """verl and transformers name float32 in places; here that is float64."""
    import transformers.models as models
    import verl.utils.torch_functional
    import verl.workers.engine.fsdp.transformer_impl as fsdp
    import verl.workers.utils.losses

    oracle_verl.precision(torch.float64)
    wide = oracle_verl.Wide(torch)
    for arch in archs:
        getattr(getattr(models, arch), f"modeling_{arch}").torch = wide
    fsdp.torch = verl.workers.utils.losses.torch = verl.utils.torch_functional.torch = wide


def verl_config(name, overrides):
    import verl.trainer

    with initialize_config_dir(str(pathlib.Path(verl.trainer.__file__).parent / "config"), version_base=None):
        return compose(name, [f"{k}={v}" for k, v in overrides.items()])


@contextlib.contextmanager
def quiet():
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield


class Group:
    """A RayWorkerGroup of one worker in this process: reads its batch from the store, writes tensors back."""
    def __init__(self, worker):
        self.worker, self._dispatch_info = worker, {"actor": [0]}

    def run(self, method, batch):
        from verl.utils import tensordict_utils as tu

        td = STORE.kv_batch_get(batch.keys)
        for k, v in batch.extra_info.items():
            tu.assign_non_tensor_data(td, k, v)
        out = getattr(self.worker, method)(td)
        tensors = [k for k, v in out.items() if torch.is_tensor(v)]
        STORE.kv_batch_put(batch.keys, fields=out.select(*tensors))
        return batch if tensors else out

    def __getattr__(self, method):
        return partial(self.run, method)


class Later(Group):
    """One whose calls answer with a future: the critic's."""
    def run(self, method, batch):
        out = super().run(method, batch)
        return types.SimpleNamespace(get=lambda: out, futures=[])


class Trainer:
    """verl's PPOTrainerSync of one mix, with its workers."""
    def __init__(self, mix):
        from verl.trainer.ppo.utils import need_critic, need_reference_policy
        from verl.trainer.ppo.v1 import trainer_base
        from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
        from verl.trainer.ppo.v1.utils import compute_advantage_for_multi_trajectories
        from verl.utils.config import omega_conf_to_dataclass, validate_config
        from verl.workers.engine_workers import ActorRolloutRefWorker

        trainer_base.ray = types.SimpleNamespace(get=lambda futures: futures)
        trainer_base.compute_advantage_for_multi_trajectories = partial(
            self.advantage, compute_advantage_for_multi_trajectories)
        self.mix, self.samples = mix, None
        config = self.config = verl_config("ppo_trainer", mix.for_verl())
        validate_config(config, need_reference_policy(config), need_critic(config))
        for optim in (config.actor_rollout_ref.actor.optim, config.critic.optim):
            optim.total_training_steps = config.trainer.total_training_steps
        t = self.trainer = PPOTrainerSync(config)
        t.tokenizer = types.SimpleNamespace(eos_token_id=0, pad_token_id=0)
        t.ref_in_actor, t.global_steps = False, 1
        t.reward_loop_manager = types.SimpleNamespace(reward_loop_worker_handles=[])
        t.replay_buffer.sample = lambda **_: (self.batch(), {})
        t.prepare_step = dict
        t.on_sample_begin = t.on_sample_end = lambda: None
        t._get_n_gpus_for_throughput = lambda: 1
        distillation = config.distillation if config.distillation.enabled else None
        t.distillation_config = distillation and omega_conf_to_dataclass(distillation)
        if t.use_critic:
            t.critic_wg = Later(self.critic(omega_conf_to_dataclass(config.critic), trainer_base.value_loss))
        if t.use_reference_policy:
            t.ref_policy_wg = Group(ActorRolloutRefWorker(config.actor_rollout_ref, role="ref"))
            t.ref_policy_wg.worker.init_model()
        actor = ActorRolloutRefWorker(config.actor_rollout_ref, role="actor",
                                      distillation_config=distillation)
        actor.init_model()
        t.actor_rollout_wg = Group(actor)
        self.modules = {"actor": actor.actor.engine.module}
        if t.use_critic:
            self.modules["critic"] = t.critic_wg.worker.engine.module

    @staticmethod
    def critic(c, value_loss):
        from verl.workers.engine_workers import TrainingWorker, TrainingWorkerConfig

        # verl hands none of these over: its critic cuts by the default token budget, whatever the keys say
        c.engine.use_dynamic_bsz = c.use_dynamic_bsz
        c.engine.max_token_len_per_gpu = c.engine.infer_max_token_len_per_gpu = c.ppo_max_token_len_per_gpu
        c.engine.micro_batch_size_per_gpu = c.ppo_micro_batch_size_per_gpu
        c.engine.infer_micro_batch_size_per_gpu = c.ppo_micro_batch_size_per_gpu
        worker = TrainingWorker(
            TrainingWorkerConfig(model_type="value_model", model_config=c.model, engine_config=c.engine,
                                 optimizer_config=c.optim, checkpoint_config=c.checkpoint))
        worker.reset()
        worker.set_loss_fn(partial(value_loss, config=c))
        return worker

    def batch(self):
        """This step's samples as the agent loop would put them into TransferQueue."""
        STORE.rows.clear()
        keys, version = [], self.trainer.global_steps - 1
        for s in self.samples:
            prompt, ids = torch.tensor(s["prompt_ids"]), torch.tensor(s["ids"])
            n, scores = len(prompt) + len(ids), torch.zeros(len(ids), dtype=torch.float64)
            scores[-1] = s["score"]
            row = dict(prompts=prompt, responses=ids, input_ids=torch.cat([prompt, ids]), num_turns=2,
                       uid=s["uid"], position_ids=torch.arange(n), response_mask=torch.ones_like(ids),
                       rm_scores=scores, loss_mask=torch.ones_like(ids), **s["teacher"])
            if self.config.actor_rollout_ref.rollout.calculate_log_probs:
                row["rollout_log_probs"] = torch.tensor(s["logp"])
            keys.append(f"{s['uid']}_{s['sample']}_0")
            STORE.rows[keys[-1]] = row
            STORE.tags[keys[-1]] = dict(seq_len=n, min_global_steps=version, max_global_steps=version)
        return Batch("train", keys, [STORE.tags[k] for k in keys])

    def advantage(self, function, data, **args):
        """What the trainer before V1 has in its batch and V1 lacks: ReMax's baselines, GDPO's rewards."""
        if self.mix.estimator == "remax":
            data.batch["reward_baselines"] = torch.tensor([s["baseline"] for s in self.samples])
        if self.mix.estimator == "gdpo":
            prompt = torch.ones(len(self.samples), 1)
            data.batch["prompts"] = prompt
            data.batch["attention_mask"] = torch.cat([prompt, data.batch["response_mask"].double()], 1).long()
            for k in ("a", "b"):
                data.non_tensor_batch[k] = np.array([float(s["extra"][k]) for s in self.samples])
        return function(data, **args)

    def step(self, samples, weights):
        """The metrics of one step from these weights, and what it added to them."""
        self.samples, metrics, timing = samples, {}, {}
        for part, module in self.modules.items():
            with torch.no_grad():
                for name, p in module.named_parameters():
                    p.copy_(weights[part][name])
        batch = self.trainer.step(metrics, timing)
        self.trainer._compute_metrics(batch, metrics, {**timing, "step": 1.0}, self.trainer.global_steps, 0)
        self.trainer.global_steps += 1
        return metrics, {
            part: {n: p.detach() - weights[part][n]
                   for n, p in module.named_parameters()}
            for part, module in self.modules.items()
        }


def sft_steps(config, note):
    """verl's SFTTrainer.fit; note(metrics, step, weights) after each update and after each validation."""
    oracle_data.verl_datasets()  # leaves out what does not import
    from verl.trainer import sft_trainer

    class Tracking:
        def __init__(self, **_):
            pass

        def log(self, data, step):
            note(data, step, {n: p.detach().clone() for n, p in trainer.engine.module.named_parameters()})

    files = types.SimpleNamespace(load_checkpoint=lambda: 0, save_checkpoint=lambda **_: 0)
    sft_trainer.Tracking, sft_trainer.CheckpointHandler = Tracking, lambda **_: files
    trainer = sft_trainer.SFTTrainer(verl_config("sft_trainer_engine", config))
    trainer.fit()
