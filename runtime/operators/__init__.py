"""The torch operators: their schemas, their implementations, and when they are registered with torch.

Importing this package imports nothing else, because `import embforge` must not import torch.
"""
