"""Execute a plan with Megatron-core and exact gradients."""
