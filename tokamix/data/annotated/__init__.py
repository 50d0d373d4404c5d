"""Images with annotations (boxes, instance masks, semantic masks), for segmentation and detection."""
