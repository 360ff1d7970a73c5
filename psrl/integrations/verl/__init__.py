"""psRL as a training engine of veRL 0.9.1.

To read from the outside in: `plugin` is what veRL loads, and chooses the engine; `engine` is
veRL's interface to it; `settings` checks and translates veRL's configuration; `batch` makes
samples, a plan and losses of a batch, and runs them; `worker` holds what lives as long as the
process: process groups, weights, optimizer. `cpu_platform` is for development without a GPU.

docs/verl.md describes set-up, configuration and limits. Of these modules only `plugin`, `engine`,
`worker.training_state` and `cpu_platform` import veRL.
"""
