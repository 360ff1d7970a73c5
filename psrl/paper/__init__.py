"""The experiments of the paper that psRL is named after, and every published number beside ours."""
