#!/bin/sh
# Tries the node on a machine with ROS 2, which has been sourced: tools/ros2/try.sh [FOLDER to build in]
# EDGELLM_PYTHON is the Python with EdgeLLM in it (python3); the node answers with the shipped model, wherever that runs.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
python=${EDGELLM_PYTHON:-python3}
case $python in /*) ;; */*) python=$PWD/$python ;; esac  # it is started in other folders, too
export EDGELLM_PYTHON="$python"
build=${1:-$(mktemp -d)}
"$python" -c "import edgellm, rclpy, sensor_msgs, diagnostic_msgs, std_srvs" ||
    { echo "source ROS 2's setup.sh first, and install EdgeLLM for $python (EDGELLM_PYTHON names another)" >&2; exit 1; }

mkdir -p "$build"
cd "$build"
colcon build --base-paths "$here" --merge-install --cmake-args -DPython3_EXECUTABLE="$(command -v "$python")"
set +u
. install/local_setup.sh
set -u

# In a group of its own, so that launch and the node are interrupted together.
if ros2 pkg prefix launch_ros > /dev/null 2>&1; then
    setsid ros2 launch edgellm_ros edgellm.launch.py image:=/edgellm/image > node.log 2>&1 &
else
    parameters=install/share/edgellm_ros/config/edgellm.yaml
    setsid "$python" -m edgellm.ros --ros-args --params-file "$parameters" > node.log 2>&1 &
fi
node=$!
end() {
    kill -s INT -- "-$node"
    for _ in 1 2 3 4 5 6 7 8 9 10; do
        sleep 1
        kill -s 0 -- "-$node" 2> /dev/null || break
    done
    kill -s KILL -- "-$node" 2> /dev/null && echo "the node had to be killed" >&2
    echo "the node wrote:"
    cat node.log
}
trap end EXIT
"$python" "$here/try.py"
