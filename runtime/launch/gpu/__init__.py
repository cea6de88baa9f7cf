"""What launchers of CUDA text share, be the GPU real or emulated: results, work space, arguments and steps."""
