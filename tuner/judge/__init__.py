"""Builds, verifies and times candidates in helper processes, and keeps the ledger of what became of them."""
