"""What the launchers of CUDA kernels share for a real and for the emulated GPU: results, work space, arguments and
steps."""
