"""Model files and the handles of what native code keeps."""
