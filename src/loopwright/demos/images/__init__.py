"""Image demos for the five vision tasks: digits, scenes of digits on photos, and Fashion-MNIST if installed.

Unlike text they need packages: numpy and Pillow, and scikit-learn for handwriting and photos. Without scikit-learn the
digits are drawn with Pillow's built-in font, on color gradients. Nothing here imports torch.
"""
