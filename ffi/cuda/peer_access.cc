#include "cuda/peer_access.h"

#include "cuda/launch.h"

namespace strata {
namespace {

std::string Enable(int device, int peer) {
  int can = 0;
  cudaError_t status = cudaDeviceCanAccessPeer(&can, device, peer);
  if (status == cudaSuccess && can == 0) {
    return "device " + std::to_string(device) + " cannot reach the memory of device " +
           std::to_string(peer);
  }
  if (status == cudaSuccess) status = cudaSetDevice(device);
  if (status == cudaSuccess) status = cudaDeviceEnablePeerAccess(peer, 0);
  if (status == cudaSuccess) return "";
  cudaGetLastError();  // takes the error back, wanted or not
  return status == cudaErrorPeerAccessAlreadyEnabled ? "" : cudaGetErrorString(status);
}

}  // namespace

std::string EnablePeerAccess(int device, int peer) {
  int current = 0;
  cudaGetDevice(&current);
  const std::string problem = Enable(device, peer);
  cudaSetDevice(current);
  return problem;
}

}  // namespace strata
