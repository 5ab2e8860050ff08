"""A small convolutional network with batch norm on scikit-learn's bundled digits."""
