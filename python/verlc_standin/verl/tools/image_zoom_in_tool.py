"""verl.tools.image_zoom_in_tool: refused by name, since verlc's models read no images."""

from verl.tools.base_tool import BaseTool


class ImageZoomInTool(BaseTool):
    def __init__(self, config, tool_schema):
        raise NotImplementedError("ImageZoomInTool gives images, and verlc trains models of text alone: take the tool out of its "
                                  "YAML")
