"""What only several ranks or a compiler show: gradients on two ranks against one process, compiled against eager."""
