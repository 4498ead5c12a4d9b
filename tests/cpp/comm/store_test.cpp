#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <future>
#include <random>

#include "base/error.h"
#include "comm/net/handshake.h"
#include "comm/rank_threads.h"
#include "comm/tcp_store.h"
#include "comm/tcp_store/wire.h"

namespace polyreme {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

std::string hex(const Digest& digest) {
  std::string text;
  for (const uint8_t byte : digest)
    text += concat("0123456789abcdef"[byte >> 4], "0123456789abcdef"[byte & 15]);
  return text;
}

TEST(Sha256, StandardVectors) {  // FIPS 180-4 examples
  EXPECT_EQ(hex(sha256("")), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  EXPECT_EQ(hex(sha256("abc")), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  EXPECT_EQ(hex(sha256("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq")),
            "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
  EXPECT_EQ(hex(sha256(std::string(1'000'000, 'a'))),
            "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

TEST(Sha256, HmacVectors) {  // RFC 4231, cases 1, 2, 6
  EXPECT_EQ(hex(hmac_sha256(std::string(20, '\x0b'), "Hi There")),
            "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7");
  EXPECT_EQ(hex(hmac_sha256("Jefe", "what do ya want for nothing?")),
            "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
  EXPECT_EQ(
      hex(hmac_sha256(std::string(131, '\xaa'), "Test Using Larger Than Block-Size Key - Hash Key First")),
      "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54");
}

TcpStoreOptions at_port(int port) {
  TcpStoreOptions options;
  options.port = port;
  options.secret = "hunter2";
  options.timeout = seconds(10);
  return options;
}

// The message of the CommError (or subclass) that `call` throws, with its class.
template <typename Call>
std::string failure_of(const Call& call) {
  try {
    call();
  } catch (...) {
    return outcome_of(std::current_exception());
  }
  return "ok";
}

void expect_text(const std::string& outcome, const std::string& type, const std::vector<std::string>& parts) {
  EXPECT_TRUE(outcome.starts_with(type)) << outcome;
  for (const std::string& part : parts)
    EXPECT_NE(outcome.find(part), std::string::npos) << "no '" << part << "' in " << outcome;
}

TEST(TcpStore, SetGetAdd) {
  const auto server = TcpStore::serve(at_port(0));
  const auto client = TcpStore::connect(at_port(server->port()));
  const std::string bytes("a\0b", 3);
  client->set("key", bytes);
  EXPECT_EQ(server->get("key", seconds(1)), bytes);
  client->set("key", "");
  EXPECT_EQ(server->try_get("key"), "");
  EXPECT_EQ(server->try_get("other"), std::nullopt);
  EXPECT_EQ(server->add("n", 5), 5);
  EXPECT_EQ(client->add("n", -7), -2);
  EXPECT_EQ(client->get("n", seconds(1)), "-2");
  EXPECT_THROW(client->add("key", 1), InvalidArgument);
  const std::string large(1 << 20, 'x');
  client->set("large", large);
  EXPECT_EQ(server->get("large", seconds(5)), large);
  EXPECT_THROW(client->set("large", large + "x"), InvalidArgument);
  EXPECT_THROW(client->set(std::string(1025, 'k'), ""), InvalidArgument);
  EXPECT_THROW(client->set("", ""), InvalidArgument);
  EXPECT_EQ(server->num_malformed() + server->num_refused(), 0);
}

TEST(TcpStore, GetWaitsAndGivesUp) {
  const auto server = TcpStore::serve(at_port(0));
  const auto client = TcpStore::connect(at_port(server->port()));
  auto value = std::async(std::launch::async, [&] { return client->get("late", seconds(10)); });
  std::this_thread::sleep_for(milliseconds(100));
  server->set("late", "here");
  EXPECT_EQ(value.get(), "here");
  expect_text(failure_of([&] { client->get("never", milliseconds(100)); }), "Timeout", {"'never'", "0.1 s"});
  expect_text(failure_of([&] { client->get("never", milliseconds(0)); }), "Timeout", {"'never'"});
  server->set("never",
              "after all");  // the answer to a request that was given up must not be taken for another
  server->set("next", "right");
  EXPECT_EQ(client->get("next", seconds(5)), "right");
}

TEST(TcpStore, ManyClientsAddAtOnce) {
  const auto server = TcpStore::serve(at_port(0));
  std::vector<std::thread> threads;
  for (int t = 0; t < 8; ++t)
    threads.emplace_back([&] {
      const auto client = TcpStore::connect(at_port(server->port()));
      for (int i = 0; i < 100; ++i) client->add("n", 1);
      client->get("go", seconds(10));
    });
  while (server->add("n", 0) < 800) std::this_thread::yield();
  server->set("go", "");
  for (std::thread& thread : threads) thread.join();
}

int free_port() { return port_of(listen_on("127.0.0.1", 0)); }

TEST(TcpStore, ClientsMayComeFirst) {
  const int port = free_port();
  auto client = std::async(std::launch::async, [&] { return TcpStore::connect(at_port(port)); });
  std::this_thread::sleep_for(milliseconds(150));
  const auto server = TcpStore::serve(at_port(port));
  client.get()->set("a", "b");
  EXPECT_EQ(server->get("a", seconds(1)), "b");
}

// Dialling a port of the ephemeral range often enough, the kernel once connects the socket to itself.
TEST(TcpStore, NobodyIsNotTakenForAStore) {
  auto options = at_port(free_port());
  options.timeout = milliseconds(1);
  for (int i = 0; i < 40; ++i) EXPECT_THROW(TcpStore::connect(options), Timeout);
}

TEST(TcpStore, NobodyThere) {
  auto options = at_port(free_port());
  options.timeout = milliseconds(200);
  expect_text(failure_of([&] { TcpStore::connect(options); }), "Timeout",
              {concat("127.0.0.1:", options.port), "Connection refused", "0.2 s"});
  options.host = "no-such-host.invalid";
  expect_text(failure_of([&] { TcpStore::connect(options); }), "CommError", {"no-such-host.invalid"});
}

TEST(TcpStore, F09_WrongSecretIsRefusedAndCounted) {
  const auto server = TcpStore::serve(at_port(0));
  const auto good = TcpStore::connect(at_port(server->port()));
  for (const char* secret : {"", "hunter3"}) {
    auto options = at_port(server->port());
    options.secret = secret;
    const std::string text = failure_of([&] { TcpStore::connect(options); });
    expect_text(text, "CommError", {"secret", concat(":", server->port())});
    EXPECT_EQ(text.find("hunter"), std::string::npos) << "the message shows a secret";
  }
  EXPECT_EQ(server->num_refused(), 2);
  good->set("still", "fine");
}

TEST(TcpStore, PortTaken) {
  const auto server = TcpStore::serve(at_port(0));
  expect_text(failure_of([&] { TcpStore::serve(at_port(server->port())); }), "CommError",
              {concat("127.0.0.1:", server->port()), "Address already in use", "MASTER_PORT"});
}

TEST(TcpStore, F06_ForeignListenersAreRecognised) {
  const FileDescriptor silent = listen_on("127.0.0.1", 0);  // the kernel accepts for it
  auto options = at_port(port_of(silent));
  options.greeting_limit = milliseconds(200);
  expect_text(failure_of([&] { TcpStore::connect(options); }), "CommError",
              {"not our store", concat("127.0.0.1:", options.port), "silent"});

  const FileDescriptor talker = listen_on("127.0.0.1", 0);
  options = at_port(port_of(talker));
  auto program = std::async(std::launch::async, [&] {
    for (const char* greeting : {"HTTP/1.1 400 Bad Request\r\n", ""}) {
      int fd = -1;
      while ((fd = accept(talker.get(), nullptr, nullptr)) < 0) std::this_thread::yield();
      const FileDescriptor connection(fd);
      send_all(connection, greeting, std::chrono::steady_clock::now() + seconds(1));
    }
  });
  expect_text(failure_of([&] { TcpStore::connect(options); }), "CommError", {"not our store"});
  expect_text(failure_of([&] { TcpStore::connect(options); }), "CommError", {"not our store", "closed"});
  program.get();
}

// Whoever waits for a rank 0 that does not come learns at whose door.
TEST(Dial, TellsWhoIsTriedWhileNobodyAnswers) {
  const int port = [] { return port_of(listen_on("127.0.0.1", 0)); }();  // closed again
  std::vector<std::string> told;
  const DialOptions options{.limit = milliseconds(500),
                            .what = "no store",
                            .remedy = "; did rank 0 start?",
                            .progress = [&](const std::string& text) { told.push_back(text); },
                            .patience = milliseconds(50)};
  expect_text(failure_of([&] { dial("127.0.0.1", port, options); }), "Timeout",
              {"no store", concat("127.0.0.1:", port), "0.5 s"});
  ASSERT_FALSE(told.empty());
  EXPECT_LE(told.size(), 4u);  // at growing intervals
  EXPECT_EQ(told.front(), concat("no store at 127.0.0.1:", port, " yet (tried 127.0.0.1:", port,
                                 ": Connection refused); trying for 0.5 s; did rank 0 start?"));
}

TEST(TcpStore, AStoreWithoutTheSecretIsNotOurs) {
  const FileDescriptor listener = listen_on("127.0.0.1", 0);
  auto impostor = std::async(std::launch::async, [&] {
    int fd = -1;
    while ((fd = accept(listener.get(), nullptr, nullptr)) < 0) std::this_thread::yield();
    const FileDescriptor connection(fd);
    const auto deadline = std::chrono::steady_clock::now() + seconds(5);
    send_all(connection, encode_hello(store_wire::kProtocol, std::string(16, 'n')) + std::string(32, 'p'),
             deadline);
    std::string ignored;
    receive_some(connection, ignored, 100, deadline);
    std::this_thread::sleep_for(milliseconds(100));
  });
  expect_text(failure_of([&] { TcpStore::connect(at_port(port_of(listener))); }), "CommError",
              {"not our store", "secret"});
  impostor.get();
}

TEST(TcpStore, ASumThatIsNoNumber) {
  const FileDescriptor listener = listen_on("127.0.0.1", 0);
  auto server = std::async(std::launch::async, [&] {
    int fd = -1;
    while ((fd = accept4(listener.get(), nullptr, nullptr, SOCK_NONBLOCK)) < 0) std::this_thread::yield();
    const FileDescriptor connection(fd);
    const auto deadline = std::chrono::steady_clock::now() + seconds(5);
    ServerHandshake handshake(store_wire::kProtocol);
    std::string bytes;
    while (!handshake.over() &&
           receive_some(connection, bytes, handshake.wanted(), deadline) == IoResult::kDone)
      send_all(connection, handshake.take(std::exchange(bytes, {}), "hunter2", ""), deadline);
    receive_some(connection, bytes, 100, deadline);
    send_all(connection, encode(store_wire::Reply{store_wire::Status::kOk, 1, "many"}), deadline);
  });
  const auto client = TcpStore::connect(at_port(port_of(listener)));
  expect_text(failure_of([&] { client->add("n", 1); }), "PeerLost", {"store lost", "malformed reply"});
  server.get();
}

TEST(TcpStore, AdoptsASocket) {
  FileDescriptor listener = listen_on("127.0.0.1", 0);
  const int port = port_of(listener);
  auto options = at_port(0);
  options.listen_fd = dup(listener.get());
  listener = FileDescriptor();
  const auto server = TcpStore::serve(options);
  EXPECT_EQ(server->port(), port);
  EXPECT_EQ(fcntl(options.listen_fd, F_GETFD) & FD_CLOEXEC, FD_CLOEXEC);
  TcpStore::connect(at_port(port))->set("a", "b");
  EXPECT_EQ(server->get("a", seconds(1)), "b");
  options.listen_fd = 0;
  EXPECT_THROW(TcpStore::serve(options), InvalidArgument);
}

// A socket that has shown the secret, to send whatever it likes.
FileDescriptor admitted_socket(int port) {
  FileDescriptor socket = dial("127.0.0.1", port, {.limit = seconds(5)});
  const auto deadline = std::chrono::steady_clock::now() + seconds(5);
  const std::string nonce = make_nonce();
  send_all(socket, encode_hello(store_wire::kProtocol, nonce), deadline);
  std::string hello;
  while (hello.size() < kHelloBytes) receive_some(socket, hello, kHelloBytes - hello.size(), deadline);
  const Digest own = proof("hunter2", "client", nonce, decode_hello(hello).nonce, "");
  send_all(socket, {reinterpret_cast<const char*>(own.data()), own.size()}, deadline);
  std::string shown;
  while (shown.size() < kProofBytes) receive_some(socket, shown, kProofBytes - shown.size(), deadline);
  return socket;
}

bool is_dropped(const FileDescriptor& socket) {
  std::string ignored;
  const auto deadline = std::chrono::steady_clock::now() + seconds(5);
  IoResult outcome = IoResult::kDone;
  while (outcome == IoResult::kDone) outcome = receive_some(socket, ignored, 4096, deadline);
  return outcome == IoResult::kClosed;
}

TEST(TcpStore, F10_MalformedFramesCostTheirSenderTheConnection) {
  const auto server = TcpStore::serve(at_port(0));
  const auto good = TcpStore::connect(at_port(server->port()));
  const auto u32 = [](uint32_t v) {
    return std::string({static_cast<char>(v), static_cast<char>(v >> 8), static_cast<char>(v >> 16),
                        static_cast<char>(v >> 24)});
  };
  const std::string head = std::string("\x01", 1) + u32(1);  // set, id 1
  const std::vector<std::string> frames = {
      u32(0xffffffff) + "x",                              // too long: dropped before it is read
      u32((1 << 21)) + "x",                               // likewise
      u32(0),                                             // empty
      u32(3) + "abc",                                     // shorter than its head
      u32(9) + std::string("\x09", 1) + u32(1) + u32(0),  // no such operation
      u32(9) + head + u32(5),                             // a key longer than the frame
      u32(9) + head + u32(0xffffffff)};
  for (const std::string& frame : frames) {
    const FileDescriptor socket = admitted_socket(server->port());
    send_all(socket, frame, std::chrono::steady_clock::now() + seconds(5));
    EXPECT_TRUE(is_dropped(socket));
  }
  EXPECT_EQ(server->num_malformed(), static_cast<int64_t>(frames.size()));
  good->set("still", "fine");
}

TEST(TcpStore, F10_SurvivesNoise) {
  const auto server = TcpStore::serve(at_port(0));
  const auto good = TcpStore::connect(at_port(server->port()));
  std::mt19937_64 random(3);
  for (int i = 0; i < 600; ++i) {
    const bool admitted = i % 2 == 0;
    const FileDescriptor socket =
        admitted ? admitted_socket(server->port()) : dial("127.0.0.1", server->port(), {.limit = seconds(5)});
    std::string noise(random() % 200, '\0');
    for (char& c : noise) c = static_cast<char>(random());
    if (admitted && noise.size() > 4) noise[1] = noise[2] = noise[3] = 0;  // a plausible length
    if (!admitted && i % 3 == 0) noise = "PLYSTORE" + noise;
    send_all(socket, noise, std::chrono::steady_clock::now() + seconds(5));
  }
  good->set("still", "fine");
  EXPECT_EQ(good->get("still", seconds(5)), "fine");
}

TEST(TcpStore, SilentStrangersDoNotBlockTheJob) {
  const auto server = TcpStore::serve(at_port(0));
  std::vector<FileDescriptor> strangers;
  for (int i = 0; i < 100; ++i) strangers.push_back(dial("127.0.0.1", server->port(), {.limit = seconds(5)}));
  TcpStore::connect(at_port(server->port()))->set("a", "b");
  EXPECT_EQ(server->get("a", seconds(5)), "b");
}

TEST(TcpStore, TheEndOfTheStoreIsPeerLost) {
  auto server = TcpStore::serve(at_port(0));
  const std::string address = concat("127.0.0.1:", server->port());
  const auto idle = TcpStore::connect(at_port(server->port()));
  const auto waiting = TcpStore::connect(at_port(server->port()));
  auto waiter =
      std::async(std::launch::async, [&] { return failure_of([&] { waiting->get("x", seconds(30)); }); });
  std::this_thread::sleep_for(milliseconds(100));
  server.reset();
  expect_text(waiter.get(), "PeerLost", {"store lost, host rank 0 at " + address});
  expect_text(failure_of([&] { idle->set("a", "b"); }), "PeerLost",
              {"store lost, host rank 0 at " + address});
  expect_text(failure_of([&] { idle->try_get("a"); }), "PeerLost", {"store lost, host rank 0 at " + address});
}

}  // namespace
}  // namespace polyreme
