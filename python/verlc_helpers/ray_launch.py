"""Ranks of a run on the nodes of a Ray cluster: an actor a rank, which runs a worker process.

  {"ranks": n, "nodes": k, "gpus": 0 or 1 a rank, "argv": [program, ...], "env": {...}, "wait_s": s}
      -> {"ranks": [{"node": address, "pid": ...}, ...]}

n / k ranks go to a node (a placement group with STRICT_PACK, as verl's resource pools), the first nodes by address; a node with
room may get several groups. Every rank of a node sees all GPUs of the group there, in the order of ranks. What a worker prints
goes to this process' output with [rank N] in front. The cluster is RAY_ADDRESS's, else the one of this machine.

Invariant: the end of this process ends the actors and their workers.
"""

import os
import sys
import threading

from verlc_helpers.protocol import HelperError, one_line, serve

try:
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
except ImportError as error:
    ray, missing = None, error

state = {}  # actors and placement groups, which live as long as this process


def actor_class():
    @ray.remote(max_restarts=0, max_concurrency=2)
    class Rank:
        """On a node: one worker process."""

        def where(self):
            node = ray.get_runtime_context().get_node_id()
            return ray.util.get_node_ip_address(), node, os.environ.get("CUDA_VISIBLE_DEVICES", "")

        def start(self, argv, env):
            import ctypes
            import shutil
            import signal
            import subprocess

            def with_the_actor():
                ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG

            program = argv[0] if os.access(argv[0], os.X_OK) else shutil.which(os.path.basename(argv[0]))
            if not program:
                raise FileNotFoundError(f"there is no {argv[0]}, and no {os.path.basename(argv[0])} on its PATH")
            self.process = subprocess.Popen([program, *argv[1:]], env={**os.environ, **env}, stdin=subprocess.DEVNULL,
                                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, preexec_fn=with_the_actor)
            return self.process.pid

        def lines(self):
            for line in self.process.stdout:
                yield line.decode("utf-8", "replace").rstrip("\n")
            code = self.process.wait()
            if code:
                yield f"the worker process ended with exit code {code}" if code > 0 else \
                      f"the worker process ended by signal {-code}"

    return Rank


def alive():
    return [node for node in ray.nodes() if node["Alive"]]


def place(request):
    """(actors in the order of ranks, where each is)"""
    per_node = request["ranks"] // request["nodes"]
    bundle = {"CPU": 1, **({"GPU": request["gpus"]} if request["gpus"] else {})}
    total = ray.cluster_resources()
    for what, each in bundle.items():
        if total.get(what, 0) < each * request["ranks"]:
            raise HelperError(f"the Ray cluster has {total.get(what, 0):.0f} {what}s on {len(alive())} nodes, and "
                              f"{request['ranks']} ranks need {each * request['ranks']}; trainer.nnodes and "
                              f"trainer.n_gpus_per_node (trainer.ranks on CPUs) say how many", "INPUT")
    groups = [ray.util.placement_group([bundle] * per_node, strategy="STRICT_PACK") for _ in range(request["nodes"])]
    state["groups"] = groups
    ready, waiting = ray.wait([g.ready() for g in groups], num_returns=len(groups), timeout=request["wait_s"])
    if waiting:
        raise HelperError(f"Ray has not given {request['nodes']} nodes with {per_node} x {bundle} each within "
                          f"{request['wait_s']:.0f} s: {len(alive())} nodes are there; `ray status` says who has what", "INPUT")
    cls, found = actor_class(), []
    for group in groups:
        actors = [cls.options(num_cpus=1, num_gpus=request["gpus"], scheduling_strategy=PlacementGroupSchedulingStrategy(
            placement_group=group, placement_group_bundle_index=i)).remote() for i in range(per_node)]
        found.append(list(zip(ray.get([a.where.remote() for a in actors]), actors)))
    own = ray.get_runtime_context().get_node_id()
    found.sort(key=lambda group: (group[0][0][1] != own, [int(x) if x.isdigit() else 0 for x in group[0][0][0].split(".")]))
    return [actor for group in found for _, actor in group], [where for group in found for where, _ in group]


def forward(rank, actor):
    try:
        for line in actor.lines.options(num_returns="streaming").remote():
            print(f"[rank {rank}] {ray.get(line)}", flush=True)
    except Exception as error:  # the actor has exited: the group notices it
        print(f"[rank {rank}] {one_line(error)}", flush=True)


def handle(request):
    actors, where = place(request)
    state["actors"] = actors
    nodes = [node for _, node, _ in where]
    started = []
    for rank, (actor, (_, node, _)) in enumerate(zip(actors, where)):
        env = {**request["env"], "VERLC_RANK": str(rank), "VERLC_RANKS": str(len(actors)),
               "VERLC_LOCAL_RANK": str(nodes[:rank].count(node)), "VERLC_LOCAL_RANKS": str(nodes.count(node))}
        if request["gpus"]:
            env["CUDA_VISIBLE_DEVICES"] = ",".join(gpu for _, n, gpu in where if n == node)
        started.append(actor.start.remote(request["argv"], env))
    ranks = []
    for rank, ref in enumerate(started):
        try:
            ranks.append({"node": where[rank][0], "pid": ray.get(ref)})
        except Exception as error:
            why = one_line(getattr(error, "cause", None) or error)
            raise HelperError(f"rank {rank} on {where[rank][0]}: {why}", "INPUT") from None
        threading.Thread(target=forward, args=(rank, actors[rank]), daemon=True).start()
    return {"ranks": ranks}


def init(_):
    if ray is None:
        raise HelperError(f"{missing}; {sys.executable} is to have Ray: VERLC_RAY_PYTHON names the interpreter", "INPUT")
    try:
        ray.init(address=os.environ.get("RAY_ADDRESS") or "auto", log_to_driver=False, logging_level="warning",
                 namespace="verlc")
    except Exception as error:
        raise HelperError(f"no Ray cluster answers: {one_line(error)}", "INPUT") from None


if __name__ == "__main__":
    serve(handle, init)
