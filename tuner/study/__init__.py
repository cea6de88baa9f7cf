"""A study: trials from a sampler in a shared storage, the race of the finals, and the decision to ship."""
