"""The CUDA text for an emulated GPU: how the host's compiler makes images of it."""
