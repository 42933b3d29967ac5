from torchvision import unavailable

__getattr__ = unavailable("torchvision.io")
