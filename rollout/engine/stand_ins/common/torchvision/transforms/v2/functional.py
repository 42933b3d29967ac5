from torchvision import InterpolationMode, unavailable

__all__ = ["InterpolationMode"]
__getattr__ = unavailable("torchvision.transforms.v2.functional")
