"""The file format of traces, which hold recorded calls: `embforge.record` writes them, `embforge tune` reads them."""
