"""Model, cluster and layout, and what computing, moving and holding tokens costs on them."""
