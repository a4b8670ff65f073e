"""A calculator as a class of verl's, with a memory of the episode: the class of examples/calculator_tool.yaml. A call costs what the
YAML's config says."""

from calculator_tool import calculate
from verl.tools.base_tool import BaseTool
from verl.tools.schemas import ToolResponse


class CalculatorTool(BaseTool):
    async def execute(self, instance_id, parameters, agent_data=None, **kwargs):
        memory = agent_data.extra_fields.setdefault("calculated", {})
        expression = str(parameters.get("expression", ""))
        again = expression in memory
        if not again:
            memory[expression] = calculate(expression)
        cost = self.config.get("cost_again", 0.0) if again else self.config.get("cost", 0.0)
        return ToolResponse(text=memory[expression]), -cost, {}
