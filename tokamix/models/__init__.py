"""Every backbone of the papers, registered with timm."""
