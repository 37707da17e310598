"""A model as a node of ROS 2: `python -m edgellm.ros`. Only `edgellm.ros.node` needs ROS 2."""
