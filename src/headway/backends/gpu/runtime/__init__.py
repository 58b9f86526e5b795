"""From a call to a launch: the plan of a kind of call, compilation, and the driver."""
