/* The floor of a request over TCP: a question and an answer between two processes over blocking sockets on loopback.
 *
 *     socket_floor SECONDS [BYTES]
 *
 * The other process answers BYTES (4,096) from memory, with the 48 bytes before them and to the 152 bytes of question that a read of
 * nvpool over `stream` has. Prints one line of JSON as files_load does. Ends with its parent.
 */
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define QUESTION 152
#define HEAD 48
#define BYTES_MAX (4 << 20)

static char buffer[BYTES_MAX + HEAD];

static uint64_t now_ns(void)
{
	struct timespec now;
	clock_gettime(CLOCK_MONOTONIC, &now);
	return now.tv_sec * 1000000000ull + now.tv_nsec;
}

static void fail(const char *what)
{
	fprintf(stderr, "socket_floor: %s: %s\n", what, strerror(errno));
	exit(1);
}

/* Whether all of it came; at the end of the connection not. */
static int receive(int fd, long bytes)
{
	for (long got = 0; got < bytes;) {
		ssize_t count = recv(fd, buffer + got, bytes - got, 0);
		if (count <= 0)
			return 0;
		got += count;
	}
	return 1;
}

static int give(int fd, long bytes)
{
	for (long given = 0; given < bytes;) {
		ssize_t count = send(fd, buffer + given, bytes - given, MSG_NOSIGNAL);
		if (count <= 0)
			return 0;
		given += count;
	}
	return 1;
}

static int by_size(const void *one, const void *other)
{
	uint32_t a = *(const uint32_t *)one, b = *(const uint32_t *)other;
	return a < b ? -1 : a > b;
}

int main(int words, char **word)
{
	double seconds = words > 1 ? atof(word[1]) : 0;
	long bytes = words > 2 ? atol(word[2]) : 4096, count = 0, room = 1 << 16;
	struct sockaddr_in place = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
	socklen_t length = sizeof place;
	int one = 1, listener = socket(AF_INET, SOCK_STREAM, 0), ours = socket(AF_INET, SOCK_STREAM, 0);
	if (seconds <= 0 || bytes < 1 || bytes > BYTES_MAX) {
		fprintf(stderr, "socket_floor SECONDS [BYTES], see its source\n");
		return 2;
	}
	if (bind(listener, (void *)&place, sizeof place) || listen(listener, 1) || getsockname(listener, (void *)&place, &length)
	    || connect(ours, (void *)&place, sizeof place))
		fail("loopback");
	int theirs = accept(listener, NULL, NULL);
	if (theirs < 0 || setsockopt(ours, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one)
	    || setsockopt(theirs, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one))
		fail("loopback");
	pid_t child = fork();
	if (child < 0)
		fail("fork");
	if (!child) {
		prctl(PR_SET_PDEATHSIG, SIGKILL);
		close(ours);
		while (receive(theirs, QUESTION) && give(theirs, bytes + HEAD))
			;
		_exit(0);
	}
	close(theirs);
	uint32_t *latencies_ns = malloc(room * sizeof *latencies_ns);
	uint64_t begin = now_ns(), last = begin, end = begin + seconds * 1e9, now;
	for (; last < end; last = now) {
		if (!give(ours, QUESTION) || !receive(ours, bytes + HEAD))
			fail("the other process");
		now = now_ns();
		if (count == room) {
			room *= 2;
			latencies_ns = realloc(latencies_ns, room * sizeof *latencies_ns);
		}
		latencies_ns[count++] = now - last > UINT32_MAX ? UINT32_MAX : now - last;
	}
	close(ours);
	waitpid(child, NULL, 0);
	qsort(latencies_ns, count, sizeof *latencies_ns, by_size);
	double took_s = (last - begin) / 1e9;
	printf("{\"count\": %ld, \"seconds\": %.6f, \"rate\": %.3f, \"bytes_rate\": %.3f, \"p50_us\": %.2f, \"p99_us\": %.2f}\n",
	       count, took_s, count / took_s, count * bytes / took_s, latencies_ns[count / 2] / 1e3,
	       latencies_ns[count * 99 / 100] / 1e3);
	return 0;
}
