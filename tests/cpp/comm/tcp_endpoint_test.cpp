// What the TCP endpoint does while nothing fails, and its checksums and frames.

#include "comm/tcp/endpoint.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <cstring>
#include <future>
#include <random>

#include "base/crc32c.h"
#include "comm/mp/endpoint_processes.h"
#include "comm/rendezvous.h"
#include "comm/tcp/wire.h"
#include "comm/tcp_store.h"

namespace polyreme {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using Bytes = std::vector<char>;

constexpr milliseconds kLimit{20'000};

// What rank `from` sends to rank `to` as its message `number`.
Bytes pattern(int from, int to, int number, size_t num_bytes) {
  std::mt19937_64 random(static_cast<uint64_t>(from * 10'007 + to * 101 + number));
  Bytes bytes(num_bytes);
  for (size_t i = 0; i < num_bytes; i += 8) {
    const uint64_t word = random();
    std::memcpy(bytes.data() + i, &word, std::min<size_t>(8, num_bytes - i));
  }
  return bytes;
}

// Every rank sends messages of these lengths to all others and receives the same, in one exchange.
void exchange_all(TcpEndpoint& endpoint, const std::vector<size_t>& lengths, int first_number = 0) {
  std::vector<Bytes> sent, received, expected;
  const int count = static_cast<int>(lengths.size());
  for (int peer = 0; peer < endpoint.size(); ++peer)
    for (int n = 0; n < count && peer != endpoint.rank(); ++n) {
      const size_t length = lengths[static_cast<size_t>(n)];
      sent.push_back(pattern(endpoint.rank(), peer, first_number + n, length));
      expected.push_back(pattern(peer, endpoint.rank(), first_number + n, length));
      received.emplace_back(length, '?');
    }
  std::vector<Message> messages;
  size_t i = 0;
  for (int peer = 0; peer < endpoint.size(); ++peer)
    for (int n = 0; n < count && peer != endpoint.rank(); ++n, ++i) {
      const auto length = static_cast<int64_t>(lengths[static_cast<size_t>(n)]);
      messages.push_back(receive_from(peer, received[i].data(), length));
      messages.push_back(send_to(peer, sent[i].data(), length));
    }
  endpoint.exchange(messages, kLimit);
  for (size_t m = 0; m < expected.size(); ++m)
    require<CommError>(received[m] == expected[m], "message ", m, " arrived changed");
}

TEST(Crc32c, StandardVectors) {  // RFC 3720, B.4
  Bytes bytes(32, '\0');
  EXPECT_EQ(crc32c(bytes.data(), 32), 0x8a9136aaU);
  bytes.assign(32, '\xff');
  EXPECT_EQ(crc32c(bytes.data(), 32), 0x62a8ab43U);
  for (size_t i = 0; i < 32; ++i) bytes[i] = static_cast<char>(i);
  EXPECT_EQ(crc32c(bytes.data(), 32), 0x46dd794eU);
  EXPECT_EQ(portable::crc32c("123456789", 9), 0xe3069283U);
}

TEST(Crc32c, TheInstructionAndTheTablesAgree) {
  const Bytes bytes = pattern(0, 1, 2, 700);
  for (size_t offset = 0; offset < 9; ++offset)
    for (size_t length = 0; length < 150; ++length) {
      EXPECT_EQ(crc32c(&bytes[offset], length), portable::crc32c(&bytes[offset], length));
      EXPECT_EQ(block_checksum(&bytes[offset], length), portable::block_checksum(&bytes[offset], length));
    }
}

TEST(Crc32c, EveryBitCounts) {
  Bytes bytes = pattern(0, 1, 3, 333);
  const uint32_t before = block_checksum(bytes.data(), bytes.size());
  for (size_t bit = 0; bit < 8 * bytes.size(); ++bit) {
    bytes[bit / 8] = static_cast<char>(bytes[bit / 8] ^ (1 << bit % 8));
    EXPECT_NE(block_checksum(bytes.data(), bytes.size()), before) << bit;
    bytes[bit / 8] = static_cast<char>(bytes[bit / 8] ^ (1 << bit % 8));
  }
}

TEST(TcpWire, HeadersAreProtected) {
  const tcp_wire::HeaderBytes good = encode(tcp_wire::Header{7, uint64_t{1} << 40});
  EXPECT_EQ(tcp_wire::decode_header(good)->sequence, 7U);
  EXPECT_EQ(tcp_wire::decode_header(good)->num_bytes, uint64_t{1} << 40);
  for (size_t bit = 0; bit < 8 * good.size(); ++bit) {
    tcp_wire::HeaderBytes bad = good;
    bad[bit / 8] = static_cast<char>(bad[bit / 8] ^ (1 << bit % 8));
    EXPECT_FALSE(tcp_wire::decode_header(bad)) << bit;
  }
}

TEST(TcpWire, ControlFrames) {
  const std::string frame =
      encode(tcp_wire::ControlFrame{tcp_wire::News::kFailure, FailureKind::kTimeout, "too late"});
  std::string buffer = frame + frame.substr(0, 5);
  bool malformed = false;
  const auto taken = tcp_wire::take_control_frame(buffer, malformed);
  ASSERT_TRUE(taken);
  EXPECT_EQ(taken->kind, FailureKind::kTimeout);
  EXPECT_EQ(taken->text, "too late");
  EXPECT_FALSE(tcp_wire::take_control_frame(buffer, malformed));
  EXPECT_FALSE(malformed);
  EXPECT_EQ(buffer, frame.substr(0, 5));
  for (size_t bit = 0; bit < 8 * frame.size(); ++bit) {
    std::string bad = frame;
    bad[bit / 8] = static_cast<char>(bad[bit / 8] ^ (1 << bit % 8));
    EXPECT_FALSE(tcp_wire::take_control_frame(bad, malformed)) << bit;
  }
  const auto cut =
      encode(tcp_wire::ControlFrame{tcp_wire::News::kLeft, FailureKind::kNone, std::string(9999, 'x')});
  EXPECT_EQ(cut.size(), tcp_wire::kControlHeadBytes + tcp_wire::kMaxTextBytes);
}

TEST(TcpEndpoint, AllLengthsBetweenAllRanks) {
  const size_t block = tcp_wire::kBlockBytes;
  for (int size = 1; size <= 5; ++size)
    expect_ok(run_endpoints(size, [&](TcpEndpoint& endpoint, RankProcesses&) {
      require<CommError>(endpoint.size() == size, "size ", endpoint.size());
      for (const size_t length : {size_t{0}, size_t{1}, size_t{4}, size_t{4071}, size_t{4097}, size_t{70'001},
                                  block - 1, block, block + 1, 3 * block, 3 * block + 5})
        exchange_all(endpoint, {length});
      exchange_all(endpoint, {});
    }));
}

TEST(TcpEndpoint, ManyMessagesOfMixedLengthsInOneExchange) {
  expect_ok(run_endpoints(3, [](TcpEndpoint& endpoint, RankProcesses&) {
    std::mt19937 random(11);  // the same on all ranks
    for (int round = 0; round < 10; ++round) {
      std::vector<size_t> lengths;
      for (int i = 0; i < 40; ++i) lengths.push_back(random() % 3 == 0 ? random() % 300'000 : random() % 64);
      exchange_all(endpoint, lengths, 100 * round);
    }
  }));
}

// More than the sockets hold, in both directions at once.
TEST(TcpEndpoint, LargeMessagesBothWaysDoNotBlockEachOther) {
  expect_ok(run_endpoints(
      4, [](TcpEndpoint& endpoint, RankProcesses&) { exchange_all(endpoint, {size_t{8} << 20}); }));
}

TEST(TcpEndpoint, SendsAndReceivesOfOnePairMayLieInDifferentExchanges) {
  expect_ok(run_endpoints(2, [](TcpEndpoint& endpoint, RankProcesses&) {
    const int peer = 1 - endpoint.rank();
    for (int round = 0; round < 200; ++round) {
      const Bytes first = pattern(0, 1, round, 33), second = pattern(0, 1, round, 5000);
      Bytes a(33), b(5000);
      if (endpoint.rank() == 0) {
        endpoint.exchange(std::vector{send_to(peer, first.data(), 33)}, kLimit);
        endpoint.exchange(std::vector{send_to(peer, second.data(), 5000)}, kLimit);
        endpoint.exchange(std::vector{receive_from(peer, a.data(), 33)}, kLimit);
      } else {
        endpoint.exchange(std::vector{receive_from(peer, a.data(), 33), receive_from(peer, b.data(), 5000)},
                          kLimit);
        endpoint.exchange(std::vector{send_to(peer, first.data(), 33)}, kLimit);
        require<CommError>(b == second, "changed");
      }
      require<CommError>(a == first, "changed");
    }
  }));
}

TEST(TcpEndpoint, Subgroups) {
  expect_ok(run_endpoints(5, [](TcpEndpoint& endpoint, RankProcesses&) {
    // Three overlapping ones, the ranks in an order of their own.
    for (const std::vector<int>& members :
         {std::vector<int>{4, 0, 2}, std::vector<int>{1, 2}, std::vector<int>{3}}) {
      const auto self = std::find(members.begin(), members.end(), endpoint.rank());
      if (self == members.end()) continue;
      const auto group = endpoint.make_subgroup(members, "some", kLimit);
      require<CommError>(group->rank() == self - members.begin(), "rank ", group->rank());
      exchange_all(dynamic_cast<TcpEndpoint&>(*group), {1, 100'000});
      exchange_all(dynamic_cast<TcpEndpoint&>(*group->make_subgroup({group->rank()}, "alone", kLimit)), {1});
    }
    exchange_all(endpoint, {1000});
  }));
}

TEST(TcpEndpoint, TwoGroupsOfOneName) {
  RankProcesses ranks(3, [](RankProcesses&, Store& store, int rank) {
    const auto first = make_tcp_endpoint(store, rank, 3, tcp_options());
    const auto second = make_tcp_endpoint(store, rank, 3, tcp_options());
    exchange_all(*second, {10});
    exchange_all(*first, {20});
  });
  expect_ok(ranks.wait(kHung));
}

TEST(TcpEndpoint, ArgumentsAreChecked) {
  expect_ok(run_endpoints(2, [](TcpEndpoint& endpoint, RankProcesses&) {
    char byte = 0;
    for (const int peer : {-1, 2, endpoint.rank()})
      EXPECT_THROW(endpoint.exchange(std::vector{send_to(peer, &byte, 1)}, kLimit), InvalidArgument);
    EXPECT_THROW(endpoint.exchange(std::vector{send_to(1 - endpoint.rank(), &byte, -1)}, kLimit),
                 InvalidArgument);
    EXPECT_THROW(endpoint.make_subgroup({1 - endpoint.rank()}, "others", kLimit), InvalidArgument);
    require<CommError>(!testing::Test::HasFailure(), "see above");
    exchange_all(endpoint, {3});
  }));
}

// Needs 4.5 GB; scripts/test.sh --full sets the variable.
TEST(TcpEndpoint, ARankThatDoesNotSayWhereItListens) {
  const std::vector<RankFields> all_fields = {{},
                                              {{"port", "1"}},
                                              {{"address", "127.0.0.1"}},
                                              {{"address", "127.0.0.1"}, {"port", "x"}},
                                              {{"address", "127.0.0.1"}, {"port", "65536"}},
                                              {{"address", "127.0.0.1"}, {"port", "99999999999"}}};
  for (const RankFields& fields : all_fields) {
    const auto server = TcpStore::serve({});
    auto peer = std::async(std::launch::async, [&, store = TcpStore::connect({.port = server->port()})] {
      rendezvous(*store, {.rank = 0, .world_size = 2, .fields = fields, .name = "tcp/world/1"});
    });
    TcpEndpointOptions options;
    options.name = "world";
    try {
      make_tcp_endpoint(*server, 1, 2, options);
      ADD_FAILURE() << "joined";
    } catch (const CommError& failure) {
      const std::string text = failure.what();
      EXPECT_TRUE(text.starts_with("rank 0 (host ")) << text;
      EXPECT_NE(text.find("does not say where it listens"), std::string::npos) << text;
    }
    peer.get();
  }
}

TEST(TcpEndpoint, MoreThanTwoGigabytes) {
  if (std::getenv("POLYREME_TEST_FULL") == nullptr) GTEST_SKIP() << "takes 4.5 GB; set POLYREME_TEST_FULL=1";
  expect_ok(run_endpoints(2, [](TcpEndpoint& endpoint, RankProcesses&) {
    const int64_t num_bytes = 2'200'000'003;
    Bytes bytes(static_cast<size_t>(num_bytes), static_cast<char>(1 - endpoint.rank()));
    if (endpoint.rank() == 0) {
      bytes.back() = 'x';
      endpoint.exchange(std::vector{send_to(1, bytes.data(), num_bytes)}, kLimit);
    } else {
      endpoint.exchange(std::vector{receive_from(0, bytes.data(), num_bytes)}, kLimit);
      require<CommError>(bytes.back() == 'x' && bytes.front() == 1 && bytes[size_t{1} << 31] == 1, "changed");
    }
  }));
}

}  // namespace
}  // namespace polyreme
