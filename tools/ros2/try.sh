#!/bin/sh
# Tries the node on a machine with ROS 2, which has been sourced: tools/ros2/try.sh [FOLDER to build in]
# EDGELLM_PYTHON is the Python with EdgeLLM in it (python3); the node answers with the shipped model, wherever that runs.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
python=${EDGELLM_PYTHON:-python3}
build=${1:-$(mktemp -d)}
"$python" -c "import edgellm, rclpy, sensor_msgs, diagnostic_msgs, std_srvs" ||
    { echo "source ROS 2's setup.sh first, and install EdgeLLM for $python (EDGELLM_PYTHON names another)" >&2; exit 1; }

mkdir -p "$build"
cd "$build"
colcon build --base-paths "$here" --merge-install --cmake-args -DPython3_EXECUTABLE="$(command -v "$python")"
set +u
. install/local_setup.sh
set -u

if ros2 pkg prefix launch_ros > /dev/null 2>&1; then
    ros2 launch edgellm_ros edgellm.launch.py image:=/edgellm/image > node.log 2>&1 &
else
    "$python" -m edgellm.ros --ros-args --params-file install/share/edgellm_ros/config/edgellm.yaml > node.log 2>&1 &
fi
node=$!
trap 'kill -INT $node 2> /dev/null; wait $node || true; echo "the node wrote:"; cat node.log' EXIT
"$python" "$here/try.py"
