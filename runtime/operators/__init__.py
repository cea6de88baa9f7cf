"""The torch operators: their schemas, their implementations, and when torch gets to know them.

Importing this package imports nothing else: `import embforge` must stay free of torch.
"""
