from torchvision import InterpolationMode, unavailable
from torchvision.transforms import functional

__all__ = ["InterpolationMode", "functional"]
__getattr__ = unavailable("torchvision.transforms")
