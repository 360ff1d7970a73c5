"""psRL as a training engine of veRL 0.9.1.

veRL loads `psrl.integrations.verl.plugin` in every process whose environment names it in
`VERL_USE_EXTERNAL_MODULES`. docs/verl.md describes set-up, configuration and limits. Of these
modules only `plugin`, `engine`, `training_state`, `config` and `cpu_platform` import veRL.
"""
