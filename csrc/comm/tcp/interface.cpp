#include <ifaddrs.h>
#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <memory>

#include "base/error.h"
#include "comm/tcp/connect.h"

namespace polyreme {
namespace {

struct NamedAddress {
  std::string name, address;
};

std::string numeric(const sockaddr* address) {
  const socklen_t length = address->sa_family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6);
  std::array<char, NI_MAXHOST> text{};
  if (getnameinfo(address, length, text.data(), text.size(), nullptr, 0, NI_NUMERICHOST) != 0) return {};
  return text.data();
}

// IPv4 first; of IPv6 no link-local ones, which mean nothing on other hosts.
std::vector<NamedAddress> own_addresses() {
  ifaddrs* list = nullptr;
  require<CommError>(getifaddrs(&list) == 0, "getifaddrs: ", std::strerror(errno));
  const std::unique_ptr<ifaddrs, decltype(&freeifaddrs)> owner(list, freeifaddrs);
  std::vector<NamedAddress> found;
  for (const int family : {AF_INET, AF_INET6})
    for (const ifaddrs* each = list; each != nullptr; each = each->ifa_next) {
      if (each->ifa_addr == nullptr || each->ifa_addr->sa_family != family) continue;
      const auto* v6 = reinterpret_cast<const sockaddr_in6*>(each->ifa_addr);
      if (family == AF_INET6 && IN6_IS_ADDR_LINKLOCAL(&v6->sin6_addr)) continue;
      found.push_back({each->ifa_name, numeric(each->ifa_addr)});
    }
  return found;
}

using AddressList = std::unique_ptr<addrinfo, decltype(&freeaddrinfo)>;

AddressList resolve_datagram(const std::string& host, const char* why) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_DGRAM;
  addrinfo* found = nullptr;
  const int error = getaddrinfo(host.c_str(), "9", &hints, &found);
  require<CommError>(error == 0, "cannot resolve '", host, "', ", why, ": ", gai_strerror(error));
  return {found, freeaddrinfo};
}

// The address that packets to `host` would leave from; none are sent. Empty if there is no way.
std::string source_towards(const std::string& host) {
  const AddressList addresses = resolve_datagram(host, "the host of the store");
  for (const addrinfo* each = addresses.get(); each != nullptr; each = each->ai_next) {
    const FileDescriptor probe(socket(each->ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0));
    sockaddr_storage own{};
    socklen_t length = sizeof(own);
    auto* generic = reinterpret_cast<sockaddr*>(&own);
    if (probe && connect(probe.get(), each->ai_addr, each->ai_addrlen) == 0 &&
        getsockname(probe.get(), generic, &length) == 0)
      return numeric(generic);
  }
  return {};
}

}  // namespace

NetworkInterface choose_interface(const std::string& wanted, const std::string& store_host) {
  const std::vector<NamedAddress> own = own_addresses();
  std::vector<std::string> candidates;
  if (wanted.empty()) {
    candidates = {store_host.empty() ? "127.0.0.1" : source_towards(store_host)};
  } else {
    for (const NamedAddress& each : own)
      if (each.name == wanted) candidates.push_back(each.address);
    if (candidates.empty()) {
      const AddressList addresses =
          resolve_datagram(wanted, "neither an interface nor an address of this host");
      for (const addrinfo* each = addresses.get(); each != nullptr; each = each->ai_next)
        candidates.push_back(numeric(each->ai_addr));
    }
  }
  std::string list;
  for (const NamedAddress& each : own) {
    list += concat(list.empty() ? "" : ", ", each.address, " (", each.name, ")");
    for (const std::string& candidate : candidates)
      if (candidate == each.address) return {candidate, concat(candidate, " (interface ", each.name, ")")};
  }
  // All of 127.0.0.0/8 is this host, though only one address of it is listed.
  for (const std::string& candidate : candidates)
    if (candidate.starts_with("127.")) return {candidate, candidate + " (loopback)"};
  throw CommError(
      concat("no interface of this host ",
             wanted.empty() ? concat("leads to the store at ", store_host) : concat("is ", wanted),
             "; it has ", list, "; name one of them"));
}

}  // namespace polyreme
