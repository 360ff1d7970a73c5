"""The library from a trace to an executed plan: run it as a script, or cell by cell.

Takes seconds on a CPU, and writes below a directory of its own in the system's temporary one.
"""

# %% [markdown]
# # Your samples
# A sample is a list of token ids, the spans of it that are trained, and whose it is. Here: two
# tasks, two rollouts each, three agent steps per rollout, every step repeating the history.

# %%
import tempfile
from pathlib import Path

import numpy as np

import psrl

ROOT = Path(__file__).resolve().parents[1]
OUT = Path(tempfile.mkdtemp(prefix="psrl_"))

rng = np.random.default_rng(0)
samples, spans, columns = [], [], {"group_id": [], "trajectory_id": [], "agent_step": []}
for task in range(2):
    prompt = rng.integers(1000, size=64).tolist()
    for rollout in range(2):
        history = list(prompt)
        for step in range(3):
            response = rng.integers(1000, size=24).tolist()
            samples.append(history + response)
            spans.append([(len(history), len(history) + len(response))])
            columns["group_id"].append(f"task{task}")
            columns["trajectory_id"].append(f"task{task}/{rollout}")
            columns["agent_step"].append(step)
            history += response + rng.integers(1000, size=40).tolist()
advantage = rng.normal(size=4).repeat(3)

trace = psrl.write_trace(
    OUT / "trace",
    [psrl.make_batch(samples, spans, advantage=advantage, **columns)],
    source="random",
    licence="CC0",
    sampling_mode="step",
)

# %% [markdown]
# # Which policy
# The comparison plans and simulates each policy, and dense training of the steps merged to
# trajectories, which is what one does without sharing.

# %%
setup = psrl.load_setup(ROOT / "examples/clusters/2cpu.toml")
compared = psrl.compare(trace, setup, ["verl", "dfs_cut", "psrl"])
print(compared.table()[["policy", "makespan_s", "speedup", "merged_speedup", "speedup_bound"]])
print(compared.ladder()[["rung", "factor", "speedup", "flop_ratio", "speedup_bound"]])
print("report:", compared.save(OUT / "comparison"))

# %% [markdown]
# # One plan
# A plan is a file. It is checked by rules that trust no policy, and replayed op by op.

# %%
plan = psrl.make_plan(trace, setup, policy="psrl")
psrl.check_plan(plan, trace)
print(f"predicted {plan.predicted['makespan_s']:.4f} s, gap {plan.predicted['gap']:.2%}")

run = psrl.simulate(plan, trace, psrl.SimOptions(slow_ranks={0: 1.5}))
print(f"with a slow rank {run.makespan_s:.4f} s, {run.metrics['bubble_fraction']:.1%} idle")
run.save(OUT / "simulated")

# %% [markdown]
# # The same plan with Megatron-core
# Two processes on this CPU; the dense plan as well, to see that sharing changes no result.

# %%
if __name__ == "__main__":  # processes that run the ranks may import this file
    options = psrl.ExecuteOptions(dtype="float32", keep_gradients=True)
    dense = psrl.make_plan(trace, setup, policy="verl")
    for name, one in (("dense", dense), ("shared", plan)):
        metrics = psrl.execute(one, trace, OUT / name, options)
        print(f"{name}: loss {metrics['loss'][0]:.6f} in {metrics['makespan_s']:.2f} s")
    for row in psrl.verify(OUT / "shared", OUT / "dense"):
        print(f"{row['quantity']}: differs by {row['largest_relative_difference']:.1e}")
